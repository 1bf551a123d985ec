"""The first worker by name that has room."""

from __future__ import annotations

from rose.api import Cluster, Fleet, TurnState, WorkerState


class First:
    def choose(self, turn: TurnState, fleet: Fleet, cluster: Cluster) -> WorkerState | None:
        return fleet.after("", turn)
