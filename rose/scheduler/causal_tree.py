"""How much a trajectory still has to make, told by what its tools returned (Libra, arXiv 2606.03077, C-MLFQ)."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

WINDOW = 200  # lengths that a node remembers; Libra's code has the same
GENERATION = 5000  # trajectories after which the older half is forgotten, as the policy drifts; Libra keeps as many
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
    """A prefix tree over sequences of tool outcomes. A node knows the tokens that finished trajectories still made
    after that sequence."""

    def __init__(self) -> None:
        self._young, self._old = _Node(), _Node()
        self._count = 0

    def add(self, outcomes: Sequence[Hashable], made_at: Sequence[int], made: int) -> None:
        """A finished trajectory: what its tools returned, the tokens that it had made at each, and in the end."""
        if self._count == GENERATION:
            self._young, self._old, self._count = _Node(), self._young, 0
        self._count += 1
        node = self._young
        node.add(made)
        for outcome, before in zip(outcomes[:DEPTH], made_at, strict=False):
            node = node.children.setdefault(outcome, _Node())
            node.add(made - before)

    def left(self, outcomes: Sequence[Hashable]) -> tuple[float, int] | None:
        """(mean, 90th percentile) of the tokens left after the longest known beginning of `outcomes`; None: nothing is
        known."""
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
