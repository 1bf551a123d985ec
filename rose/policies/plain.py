"""Policies that most frameworks have: fixed capacity, first come first served, and routing by round
robin, by load or by cached prefix."""

from __future__ import annotations

from rose.scheduler.events import Action
from rose.scheduler.fleet import Fleet
from rose.scheduler.state import Cluster, TurnState, WorkerState


class Fixed:
    """Never requests capacity, and uses every worker that joins."""

    def decide(self, at: float, cluster: Cluster) -> list[Action]:
        return []


class Fifo:
    """Order of arrival. A turn that lost its worker keeps its place."""

    def key(self, turn: TurnState, cluster: Cluster) -> int:
        return turn.sequence


class RoundRobin:
    """The next worker by name that has room, whatever its load: the baseline of most frameworks."""

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
    """Cache-affine routing: ROSE's order (section 4) without cooperative workers.

    1. The worker that has the trajectory's prefix cached, while it has room.
    2. The worker that has the group's prompt cached, unless its load exceeds that of the least
       loaded worker by more than `imbalance` (share of capacity).
    3. The least loaded worker.

    A worker whose memory was revoked is used only if no other worker has room.
    """

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
    """False if there is no worker, or if its memory was revoked and that of `least` was not."""
    return worker is not None and (least.revoked or not worker.revoked)
