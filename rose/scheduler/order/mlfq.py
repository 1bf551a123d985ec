"""Libra's causality-driven multi-level feedback queue, as an order."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Literal

from rose.scheduler.causal_tree import CausalTree
from rose.scheduler.events import Event, TrajectoryEnded, TurnEnded
from rose.scheduler.state import Cluster, TurnState

SMALL, LARGE = 500, 5000  # tokens that a tool returned: the classes of Libra's code


@dataclass
class _Trajectory:
    level: int = 0
    made: int = 0  # tokens of its finished turns
    context: int = 0  # tokens at the end of its last turn
    judged: str = ""  # the last turn that its level was judged at
    outcomes: list[Hashable] = field(default_factory=list)
    made_at: list[int] = field(default_factory=list)  # tokens made when the tool returned


class Mlfq:
    """Levels by the work that is left, told by causes, not by a length prediction (Libra, arXiv 2606.03077, C-MLFQ).

    Every trajectory begins on the first level. When a tool returns, what the tools of this trajectory returned so far
    (tool, success, size class of the result) is looked up in a prefix tree of finished trajectories: if the mean and
    the 90th percentile of the tokens that those had left fall on the same level, the trajectory moves there, up or
    down; if they disagree, it stays. Without either, one that has made more tokens than its level allows sinks by one,
    as in any feedback queue. `limits`: tokens of each level but the last; Libra's code has short (5,000) and long.

    Libra's levels are buckets of engines, which is `routing=libra`; as an order, the first level goes `first`: `short`
    is the feedback queue, `long` starts the tail early. Levels are not strict, or the last would starve: a turn goes
    behind those of the levels before its own that arrive within the next `patience` turns per level, which is ours.
    Live: nothing is missing, if the environments say whether tools failed; one that does not has one outcome.
    """

    def __init__(self, limits: list[int], first: Literal["short", "long"], patience: int) -> None:
        if not limits or sorted(set(limits)) != list(limits) or limits[0] < 1:
            raise ValueError(f"limits={limits}: tokens, at least 1, ascending, one per level but the last")
        if first not in ("short", "long"):
            raise ValueError(f"first={first!r}: short or long")
        if patience < 0:
            raise ValueError(f"patience={patience}: turns, 0 (first come, first served) or more")
        self.limits, self.first, self.patience = list(limits), first, patience
        self._tree = CausalTree()
        self._running: dict[str, _Trajectory] = {}

    def key(self, turn: TurnState, cluster: Cluster) -> int:
        trajectory = self._running.setdefault(turn.trajectory, _Trajectory())
        if trajectory.judged != turn.turn:  # it also enters the queue when it lost its worker
            self._judge(trajectory, turn)
        rank = trajectory.level if self.first == "short" else len(self.limits) - trajectory.level
        return turn.sequence + rank * self.patience

    def heard(self, event: Event, cluster: Cluster) -> None:
        match event:
            case TurnEnded(turn=name, tokens=tokens):
                turn = cluster.turns[name]
                if trajectory := self._running.get(turn.trajectory):
                    trajectory.made += tokens
                    trajectory.context = turn.context_tokens + tokens
            case TrajectoryEnded(trajectory=name, tokens=tokens):
                trajectory = self._running.pop(name, None)
                if trajectory and tokens:  # 0: cancelled, and its length unknown
                    self._tree.add(trajectory.outcomes, trajectory.made_at, tokens)

    def _judge(self, trajectory: _Trajectory, turn: TurnState) -> None:
        first, trajectory.judged = not trajectory.judged, turn.turn
        if first:
            return
        size = turn.context_tokens - trajectory.context
        trajectory.outcomes.append((turn.domain, turn.outcome, (size > SMALL) + (size > LARGE)))
        trajectory.made_at.append(trajectory.made)
        left = self._tree.left(trajectory.outcomes)
        if left is not None and len({bisect_left(self.limits, tokens) for tokens in left}) == 1:
            trajectory.level = bisect_left(self.limits, left[0])
        elif trajectory.level < len(self.limits) and trajectory.made > self.limits[trajectory.level]:
            trajectory.level += 1
