"""Which worker takes a turn. One class per policy; `rose.scheduler.registry` knows them by name."""

from __future__ import annotations

from rose.scheduler.state import Cluster, TurnState, WorkerState


def _least_loaded(candidates: list[WorkerState]) -> WorkerState:
    return min(candidates, key=lambda w: (w.load, w.worker))


class RoundRobin:
    """Each worker in turn, whatever its load; the baseline of most frameworks."""

    def __init__(self) -> None:
        self._last = ""

    def choose(self, turn: TurnState, candidates: list[WorkerState], cluster: Cluster) -> WorkerState:
        after = [w for w in candidates if w.worker > self._last]
        worker = (after or candidates)[0]
        self._last = worker.worker
        return worker


class LeastLoaded:
    """The worker with the smallest share of its capacity assigned."""

    def choose(self, turn: TurnState, candidates: list[WorkerState], cluster: Cluster) -> WorkerState:
        return _least_loaded(candidates)


class CacheAffine:
    """The worker that has the trajectory's prefix cached while it has room; a new trajectory goes where
    its group's prompt is cached unless that worker is busier than the least loaded by more than
    `imbalance` (share of capacity); else the least loaded. ROSE section 4's order, without cooperative
    workers."""

    def __init__(self, imbalance: float) -> None:
        self.imbalance = imbalance

    def choose(self, turn: TurnState, candidates: list[WorkerState], cluster: Cluster) -> WorkerState:
        by_name = {w.worker: w for w in candidates}
        home = by_name.get(cluster.home.get(turn.trajectory, ""))
        if home is not None:
            return home
        least = _least_loaded(candidates)
        shared = by_name.get(cluster.group_home.get(turn.group, ""))
        if shared is not None and shared.load - least.load <= self.imbalance:
            return shared
        return least
