"""The first worker by name that has room."""

from __future__ import annotations

from rose.scheduler.fleet import Fleet
from rose.scheduler.state import Cluster, TurnState, WorkerState


class First:
    def choose(self, turn: TurnState, fleet: Fleet, cluster: Cluster) -> WorkerState | None:
        return fleet.after("", turn)
