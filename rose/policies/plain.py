"""What most frameworks do: the job's own ranks, first come first served, the least loaded or the
next worker, or where the prefix is cached."""

from __future__ import annotations

from rose.scheduler.events import Action
from rose.scheduler.fleet import Fleet
from rose.scheduler.state import Cluster, TurnState, WorkerState


class Fixed:
    """Never asks for capacity and never rests any."""

    def decide(self, at: float, cluster: Cluster) -> list[Action]:
        return []


class Fifo:
    """In order of arrival; a turn that lost its worker keeps its place."""

    def key(self, turn: TurnState, cluster: Cluster) -> int:
        return turn.sequence


class RoundRobin:
    """The next worker by name that has room, whatever its load; the baseline of most frameworks."""

    def __init__(self) -> None:
        self._last = ""

    def choose(self, turn: TurnState, fleet: Fleet, cluster: Cluster) -> WorkerState | None:
        worker = fleet.after(self._last, turn)
        if worker is not None:
            self._last = worker.worker
        return worker


class LeastLoaded:
    """The worker with the smallest share of its capacity assigned."""

    def choose(self, turn: TurnState, fleet: Fleet, cluster: Cluster) -> WorkerState | None:
        return fleet.least(turn)


class CacheAffine:
    """The worker that has the trajectory's prefix cached while it has room; a new trajectory goes
    where its group's prompt is cached unless that worker is busier than the least loaded by more
    than `imbalance` (share of capacity); else the least loaded. Workers from which memory was taken
    back come last. ROSE section 4's order, without cooperative workers."""

    def __init__(self, imbalance: float) -> None:
        if imbalance < 0:
            raise ValueError(f"imbalance={imbalance:g}: share of a worker's capacity, 0 or more")
        self.imbalance = imbalance

    def choose(self, turn: TurnState, fleet: Fleet, cluster: Cluster) -> WorkerState | None:
        least = fleet.least(turn)
        home = fleet.get(cluster.home.get(turn.trajectory, ""), turn)
        if least is None or _as_steady(home, least):
            return home
        shared = fleet.get(cluster.group_home.get(turn.group, ""), turn)
        if _as_steady(shared, least) and shared.load - least.load <= self.imbalance:
            return shared
        return least


def _as_steady(worker: WorkerState | None, least: WorkerState) -> bool:
    return worker is not None and (least.revoked or not worker.revoked)
