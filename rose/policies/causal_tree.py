"""How much a trajectory still has to make, told by what its tools returned (Libra, arXiv
2606.03077, C-MLFQ)."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from rose.scheduler.events import Event, TrajectoryEnded, TurnEnded
from rose.scheduler.state import Cluster, TurnState

SMALL, LARGE = 500, 5000  # tokens that a tool returned: the classes of Libra's code
WINDOW = 200  # lengths that a node remembers; Libra's code has the same
# trajectories after which the older half is forgotten, as the policy drifts; Libra keeps as many
GENERATION = 5000
DEPTH = 16  # of a path; ours, it bounds the tree


@dataclass
class _Node:
    children: dict[Hashable, _Node] = field(default_factory=dict)
    lengths: deque[int] = field(default_factory=deque)  # tokens left, in order of arrival
    ordered: list[int] = field(default_factory=list)
    total: int = 0

    def add(self, left: int) -> None:
        if len(self.lengths) == WINDOW:
            oldest = self.lengths.popleft()
            del self.ordered[bisect_left(self.ordered, oldest)]
            self.total -= oldest
        self.lengths.append(left)
        insort(self.ordered, left)
        self.total += left


class CausalTree:
    """A prefix tree over sequences of tool outcomes. A node knows the tokens that finished
    trajectories still made after that sequence."""

    def __init__(self) -> None:
        self._young, self._old = _Node(), _Node()
        self._count = 0

    def add(self, outcomes: Sequence[Hashable], made_at: Sequence[int], made: int) -> None:
        """A finished trajectory: what its tools returned, the tokens that it had made at each, and
        in the end."""
        if self._count == GENERATION:
            self._young, self._old, self._count = _Node(), self._young, 0
        self._count += 1
        node = self._young
        node.add(made)
        for outcome, before in zip(outcomes[:DEPTH], made_at, strict=False):
            node = node.children.setdefault(outcome, _Node())
            node.add(made - before)

    def left(self, outcomes: Sequence[Hashable]) -> tuple[float, int] | None:
        """(mean, 90th percentile) of the tokens left after the longest known beginning of
        `outcomes`; None: nothing is known."""
        young, depth = self._find(self._young, outcomes)
        old, deeper = self._find(self._old, outcomes)
        node = old if deeper > depth or not young.lengths else young
        if not node.lengths:
            return None
        count = len(node.ordered)
        return node.total / count, node.ordered[min(count - 1, count * 9 // 10)]

    @staticmethod
    def _find(node: _Node, outcomes: Sequence[Hashable]) -> tuple[_Node, int]:
        for depth, outcome in enumerate(outcomes[:DEPTH]):
            child = node.children.get(outcome)
            if child is None:
                return node, depth
            node = child
        return node, min(len(outcomes), DEPTH)


@dataclass
class _Trajectory:
    level: int = 0
    made: int = 0  # tokens of its finished turns
    context: int = 0  # tokens at the end of its last turn
    judged: str = ""  # the last turn that its level was judged at
    outcomes: list[Hashable] = field(default_factory=list)
    made_at: list[int] = field(default_factory=list)  # tokens made when the tool returned


class Levels:
    """The level of each trajectory, by the tokens that it probably has left.

    Every trajectory begins on the first level. When a tool returns, what the tools of this
    trajectory returned so far (tool, success, size class of the result) is looked up in the tree:
    if the mean and the 90th percentile of the tokens that finished trajectories had left fall on
    the same level, the trajectory moves there, up or down; else it stays. Libra's code has a tree
    for each prompt besides, which it meets again in the next epoch; here is one for all. `limits`:
    tokens of each level but the last. `sinks`: without evidence, one that has made more tokens than
    its level allows moves one down, as in any feedback queue; Libra's code leaves it.

    Raises `ValueError` for limits that aren't ascending.
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
        """The trajectory's level, from 0; judged anew at a trajectory's next turn."""
        trajectory = self._running.setdefault(turn.trajectory, _Trajectory())
        if trajectory.judged != turn.turn:  # it is asked for again when it lost its worker
            self._judge(trajectory, turn)
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
        elif (
            self._sinks
            and trajectory.level < len(self.limits)
            and trajectory.made > self.limits[trajectory.level]
        ):
            trajectory.level += 1
