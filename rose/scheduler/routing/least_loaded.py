"""The least loaded worker."""

from __future__ import annotations

from rose.scheduler.fleet import Fleet
from rose.scheduler.state import Cluster, TurnState, WorkerState


class LeastLoaded:
    """The worker with the smallest share of its capacity assigned."""

    def choose(self, turn: TurnState, fleet: Fleet, cluster: Cluster) -> WorkerState | None:
        return fleet.least(turn)
