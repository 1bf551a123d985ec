"""First come, first served."""

from __future__ import annotations

from rose.scheduler.state import Cluster, TurnState


class Fifo:
    """In order of arrival; a turn that lost its worker keeps its place."""

    def key(self, turn: TurnState, cluster: Cluster) -> int:
        return turn.sequence
