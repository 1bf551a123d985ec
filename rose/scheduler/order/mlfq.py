"""Libra's causality-driven multi-level feedback queue, as an order."""

from __future__ import annotations

from typing import Literal

from rose.scheduler.causal_tree import Levels
from rose.scheduler.events import Event
from rose.scheduler.state import Cluster, TurnState


class Mlfq:
    """Levels by the work that is left, told by causes, not by a length prediction (Libra, arXiv
    2606.03077, C-MLFQ; the authors' code, github.com/NetX-lab/Libra).
    `rose.scheduler.causal_tree.Levels` says how a trajectory moves.

    `limits`: tokens of each level but the last; Libra's code has short (5,000) and long. Its levels
    are buckets of engines, which is `routing=libra`; as an order, the first level goes `first`:
    `short` is the feedback queue, `long` starts the tail early. Here one without evidence sinks.
    Levels are not strict, or the last would starve: a turn goes behind those of the levels before
    its own that arrive within the next `patience` turns per level, which is ours. Live: nothing is
    missing, if the environments say whether tools failed; one that does not has one outcome.
    """

    def __init__(self, limits: list[int], first: Literal["short", "long"], patience: int) -> None:
        if first not in ("short", "long"):
            raise ValueError(f"first={first!r}: short or long")
        if patience < 0:
            raise ValueError(f"patience={patience}: turns, 0 (first come, first served) or more")
        self.first, self.patience = first, patience
        self._levels = Levels(limits, sinks=True)

    def key(self, turn: TurnState, cluster: Cluster) -> int:
        level = self._levels.of(turn)
        rank = level if self.first == "short" else len(self._levels.limits) - level
        return turn.sequence + rank * self.patience

    def heard(self, event: Event, cluster: Cluster) -> None:
        self._levels.heard(event, cluster)
