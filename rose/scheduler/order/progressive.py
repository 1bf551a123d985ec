"""Who has come furthest goes first."""

from __future__ import annotations

from rose.scheduler.events import Event, TrajectoryEnded, TurnEnded
from rose.scheduler.state import Cluster, TurnState

ARRIVALS = 1 << 48  # turns of a run, at most


class Progressive:
    """Trajectories, not turns, are scheduled: a trajectory's priority grows with each turn that it
    has finished, equal ones go by the arrival of their first turn (Heddle, arXiv 2603.28101,
    progressive priority).

    In order of turns, a long trajectory waits behind everyone else once per turn, and its waits add
    up to the tail. Here those that are nearest to their end go on, on engines that still hold their
    prefix, and new ones fill up the rest. Heddle refines a learnt prediction of the length after
    each step; that is left out: turns finished stand for it. Nothing starves: those ahead of a
    trajectory are finitely many, and each has finitely many turns. Live: nothing is missing; a turn
    that an engine has is not preempted for one that waits.
    """

    def __init__(self) -> None:
        self._progress: dict[
            str, list[int]
        ] = {}  # trajectory -> [turns finished, arrival of its first]

    def key(self, turn: TurnState, cluster: Cluster) -> int:
        finished, arrival = self._progress.setdefault(turn.trajectory, [0, turn.sequence])
        # one number: it is compared some thirty times per turn
        return arrival - finished * ARRIVALS

    def heard(self, event: Event, cluster: Cluster) -> None:
        match event:
            case TurnEnded(turn=name):
                if progress := self._progress.get(cluster.turns[name].trajectory):
                    progress[0] += 1
            case TrajectoryEnded(trajectory=name):
                self._progress.pop(name, None)
