"""Where the prefix is cached, else the least loaded worker."""

from __future__ import annotations

from rose.scheduler.fleet import Fleet
from rose.scheduler.state import Cluster, TurnState, WorkerState


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
