"""Seer's context-aware scheduling."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from rose.scheduler.events import Event, GroupFinished, StepBegun, TrajectoryEnded, TurnEnded
from rose.scheduler.state import Cluster, TurnState


@dataclass
class _Group:
    probe: str = ""  # the trajectory that shows how long the others will be
    longest: int = 0  # tokens of its longest finished trajectory; 0: none has finished
    # trajectory that runs -> tokens of its finished turns
    made: dict[str, int] = field(default_factory=dict)
    turns: dict[str, str] = field(default_factory=dict)  # turn that has not ended -> trajectory


class LongestFirst:
    """The group's own trajectories tell how long the others will be (Seer, arXiv 2511.14617,
    context-aware scheduling).

    Of each group one trajectory is the probe, the first that asks for a turn. Probes go before all
    others, those that have made the fewest tokens first, so that short ones end and long ones show
    themselves early. The others go in order of their group's estimate, the longest first: the
    tokens of its longest finished trajectory. A group of which none has finished counts as the
    longest of all. Equal ones go by arrival.

    Seer estimates single responses; here a trajectory of several turns is what has a length.
    Nothing starves: a step has finitely many turns, and an asynchronous policy admits no new groups
    while old ones hold its places. Live: nothing is missing; a turn that an engine has is not
    preempted for one that waits.
    """

    def __init__(self) -> None:
        self._groups: dict[str, _Group] = {}
        self._moved: list[str] = []  # turns whose key the last event changed

    def key(self, turn: TurnState, cluster: Cluster) -> tuple[int, float]:
        group = self._groups.setdefault(turn.group, _Group())
        group.turns[turn.turn] = turn.trajectory
        group.made.setdefault(turn.trajectory, 0)
        if group.longest:
            return 1, -group.longest
        group.probe = group.probe or turn.trajectory
        if group.probe == turn.trajectory:
            return 0, group.made[turn.trajectory] + turn.made_tokens
        return 1, float("-inf")

    def heard(self, event: Event, cluster: Cluster) -> None:
        self._moved = []
        match event:
            case TurnEnded(turn=name, tokens=tokens):
                turn = cluster.turns[name]
                if (group := self._groups.get(turn.group)) is not None and group.turns.pop(
                    name, None
                ):
                    group.made[turn.trajectory] += tokens
            case TrajectoryEnded(trajectory=name, tokens=tokens):
                self._trajectory_ended(name, tokens, cluster.group_of.get(name, ""))
            case GroupFinished(group=name):
                self._groups.pop(name, None)
            case StepBegun():  # those of dropped groups
                self._groups = {name: group for name, group in self._groups.items() if group.made}

    def changed(self, event: Event, cluster: Cluster) -> Iterable[str]:
        return self._moved

    def _trajectory_ended(self, trajectory: str, tokens: int, name: str) -> None:
        """`tokens` is 0 if it was cancelled or its environment failed: then another becomes the
        probe."""
        group = self._groups.get(name)
        if group is None:
            return
        group.made.pop(trajectory, None)
        if tokens > group.longest:
            group.longest = tokens
            self._moved = list(group.turns)
        elif not group.longest and group.probe == trajectory:
            group.probe = next(iter(group.turns.values()), "")
            self._moved = list(group.turns)
