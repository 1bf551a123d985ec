"""Prediction of the tokens that a trajectory has left, by the outcomes of its tool calls (Libra,
arXiv 2606.03077, C-MLFQ)."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from rose.scheduler.events import Event, TrajectoryEnded, TurnEnded
from rose.scheduler.state import Cluster, TurnState

# A tool's result is medium above SMALL tokens, large above LARGE. The values of Libra's code.
SMALL = 500
LARGE = 5000
WINDOW = 200  # lengths that a node remembers; the value of Libra's code
# A tree covers this many trajectories. Then a new tree starts, and of the older trees only the last
# is kept, because the policy drifts. Libra keeps as many trajectories.
GENERATION = 5000
DEPTH = 16  # most tool calls on a path; ours, a bound on the tree's size


@dataclass
class _Node:
    children: dict[Hashable, _Node] = field(default_factory=dict)
    lengths: deque[int] = field(default_factory=deque)  # tokens left, in order of arrival
    ordered: list[int] = field(default_factory=list)  # the same, ascending
    total: int = 0  # sum of `lengths`

    def add(self, left: int) -> None:
        if len(self.lengths) == WINDOW:
            oldest = self.lengths.popleft()
            del self.ordered[bisect_left(self.ordered, oldest)]
            self.total -= oldest
        self.lengths.append(left)
        insort(self.ordered, left)
        self.total += left


class CausalTree:
    """Prefix tree over sequences of tool outcomes. A node knows how many tokens finished
    trajectories generated after its sequence of outcomes."""

    def __init__(self) -> None:
        self._young, self._old = _Node(), _Node()
        self._count = 0

    def add(self, outcomes: Sequence[Hashable], made_at: Sequence[int], made: int) -> None:
        """Add a finished trajectory: the outcomes of its tool calls, the tokens generated before
        each (`made_at`), and its tokens in total (`made`)."""
        if self._count == GENERATION:
            self._young, self._old, self._count = _Node(), self._young, 0
        self._count += 1
        node = self._young
        node.add(made)
        for outcome, before in zip(outcomes[:DEPTH], made_at, strict=False):
            node = node.children.setdefault(outcome, _Node())
            node.add(made - before)

    def left(self, outcomes: Sequence[Hashable]) -> tuple[float, int] | None:
        """Return (mean, 90th percentile) of the tokens left after the longest known prefix of
        `outcomes`, or None if no trajectory has finished."""
        young, depth = self._find(self._young, outcomes)
        old, deeper = self._find(self._old, outcomes)
        node = old if deeper > depth or not young.lengths else young
        if not node.lengths:
            return None
        count = len(node.ordered)
        return node.total / count, node.ordered[min(count - 1, count * 9 // 10)]

    @staticmethod
    def _find(node: _Node, outcomes: Sequence[Hashable]) -> tuple[_Node, int]:
        """Return the last known node on the path of `outcomes` from `node`, and its depth."""
        for depth, outcome in enumerate(outcomes[:DEPTH]):
            child = node.children.get(outcome)
            if child is None:
                return node, depth
            node = child
        return node, min(len(outcomes), DEPTH)


@dataclass
class _Trajectory:
    level: int = 0
    made: int = 0  # tokens generated in its finished turns
    context: int = 0  # tokens of context at the end of its last turn
    judged: str = ""  # the turn for which the level was last computed
    outcomes: list[Hashable] = field(default_factory=list)
    made_at: list[int] = field(default_factory=list)  # `made` at each of the outcomes


class Levels:
    """The level of each trajectory, by the tokens that it probably has left.

    Every trajectory starts on the first level. When a tool returns, the outcomes of the
    trajectory's tool calls so far (environment, success, size class of the result) are looked up in
    the tree. If the mean and the 90th percentile of the tokens left fall on the same level, the
    trajectory moves to that level; otherwise there is no evidence and it stays. Libra's code also
    has a tree per prompt, for the next epoch; here all prompts share one.

    `limits` are the tokens of each level but the last. With `sinks`, a trajectory without evidence
    that has generated more tokens than its level's limit moves to the next level, as in any
    feedback queue; Libra's code keeps its level. Raises `ValueError` for limits that aren't
    ascending.
    """

    def __init__(self, limits: Sequence[int], sinks: bool) -> None:
        if not limits or sorted(set(limits)) != list(limits) or limits[0] < 1:
            raise ValueError(
                f"limits={list(limits)}: tokens, at least 1, ascending, one per level but the last"
            )
        self.limits, self._sinks = list(limits), sinks
        self._tree = CausalTree()
        self._running: dict[str, _Trajectory] = {}

    def of(self, turn: TurnState) -> int:
        """Return the level of the turn's trajectory, from 0. It is computed once per turn."""
        trajectory = self._running.setdefault(turn.trajectory, _Trajectory())
        if trajectory.judged != turn.turn:  # A turn that lost its worker keeps its level.
            self._update_level(trajectory, turn)
        return trajectory.level

    def on_event(self, event: Event, cluster: Cluster) -> None:
        match event:
            case TurnEnded(turn=name, tokens=tokens):
                turn = cluster.turns[name]
                if trajectory := self._running.get(turn.trajectory):
                    trajectory.made += tokens
                    trajectory.context = turn.context_tokens + tokens
            case TrajectoryEnded(trajectory=name, tokens=tokens):
                trajectory = self._running.pop(name, None)
                if trajectory and tokens:  # 0 if it was cancelled and its length is unknown
                    self._tree.add(trajectory.outcomes, trajectory.made_at, tokens)

    def _update_level(self, trajectory: _Trajectory, turn: TurnState) -> None:
        """Note the outcome of the tool call before this turn, and compute the level again."""
        first, trajectory.judged = not trajectory.judged, turn.turn
        if first:
            return
        size = turn.context_tokens - trajectory.context
        trajectory.outcomes.append((turn.domain, turn.outcome, (size > SMALL) + (size > LARGE)))
        trajectory.made_at.append(trajectory.made)
        left = self._tree.left(trajectory.outcomes)
        if left is not None and len({bisect_left(self.limits, tokens) for tokens in left}) == 1:
            trajectory.level = bisect_left(self.limits, left[0])
        elif (
            self._sinks
            and trajectory.level < len(self.limits)
            and trajectory.made > self.limits[trajectory.level]
        ):
            trajectory.level += 1
