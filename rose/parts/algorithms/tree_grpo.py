"""Tree GRPO: GRPO on trees of rollouts, whose segments are compared with their siblings at forks.

Trajectories that fork off each other (`rollout/branch`) share their turns up to the fork. A segment
is a run of turns that the same trajectories share. With V(leaf) = the leaf's reward and V(segment)
= the mean of V over its children, the tokens of a segment have the advantage

    A(segment) = (V(segment) - mean of V over the segment and its siblings) / std

The siblings of a first segment are the group's other trees. std is that of the group's rewards, as
in GRPO. Without forks the algorithm is GRPO. Comparing siblings below a node is the intra-tree
advantage of Tree-GRPO (Ji et al. 2025, arXiv:2509.21240) and SPO's tree (Guo et al. 2025,
arXiv:2505.23564). One std serves all levels, so a path's advantages add up to its leaf's GRPO
advantage. With each fork's own std two siblings would have +-0.7 whatever their difference.

Weights: a tree counts as one rollout. Each of k siblings counts as 1/k of the segment that they
fork off, since they are k samples of one continuation. If a tree ends before it forks, its
remaining trajectories become new trees (as in ARPO, arXiv:2507.19849). So a group has a random
number of trees, which all have the same weight. That number is a stopping time, and by Wald's
identity the sum over the trees has the policy gradient's direction. Equal weights of leaves would
instead favour episodes that last until a fork. In each leaf a token has the leaf's weight / the
leaf's number of tokens, as in GRPO. A segment's tokens have the sum over its leaves. Left out:
Tree-GRPO's sum with the leaf's own inter-tree advantage, which would credit a segment with earlier
decisions.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, ClassVar

from rose.trainer.algorithms.base import Summary
from rose.trainer.algorithms.grpo import Grpo
from rose.trainer.algorithms.surrogate import STD_EPSILON, group_std

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class TreeGrpo(Grpo):
    """Tree GRPO, with GRPO's loss."""

    trains_segments: ClassVar[bool] = True

    def advantages(self, summary: Summary) -> Tensor:
        """Compute the advantage of each turn's segment: (N, K) float32; (N,) without forks."""
        rewards, forest = summary.rewards.double(), _Forest(summary)
        advantages = forest.of_turns(forest.beside_siblings(rewards.tolist()))
        if self.scale_by_std:
            std = group_std(rewards, summary.groups)
            advantages = (advantages.transpose(0, -1) / (std + STD_EPSILON)).transpose(0, -1)
        return advantages.float()

    def token_weights(self, summary: Summary) -> Tensor:
        """Compute weights in the shape of `advantages`. A segment has the sum over its leaves."""
        forest = _Forest(summary)
        shares, tokens = forest.shares(), summary.response_tokens.tolist()
        weights: dict[int, float] = defaultdict(float)
        for row, path in enumerate(forest.paths):
            for segment in path:
                by = self.normaliser or max(1, tokens[row])
                weights[segment] += shares[row] / by / sum(shares)
        return forest.of_turns(weights).float()


class _Forest:
    """The batch's trees. A node is a segment's number or ("leaf", row). The parent of a group's
    first segments is ("group", number of the group)."""

    def __init__(self, summary: Summary) -> None:
        self._turns = summary.segments  # (N, K)
        if self._turns is None:  # (N,): without forks, one segment for each trajectory
            self._turns = summary.groups.new_ones(len(summary.groups)).cumsum(0) - 1
        rows = self._turns.view(len(summary.groups), -1).tolist()
        self.paths = [list(dict.fromkeys(s for s in row if s >= 0)) for row in rows]
        self._below: dict[Hashable, dict[Hashable, None]] = defaultdict(dict)  # parents first
        for row, (path, group) in enumerate(zip(self.paths, summary.groups.tolist(), strict=True)):
            for parent, node in pairwise([("group", group), *path, ("leaf", row)]):
                self._below[parent][node] = None

    def beside_siblings(self, rewards: list[float]) -> dict[int, float]:
        """Compute V of each node less the mean of V over it and its siblings."""
        values = {("leaf", row): reward for row, reward in enumerate(rewards)}
        found = {}
        for parent, nodes in reversed(self._below.items()):
            values[parent] = sum(values[node] for node in nodes) / len(nodes)
            found |= {node: values[node] - values[parent] for node in nodes}
        return found

    def shares(self) -> list[float]:
        """Return each leaf's weight: the product of 1 / number of siblings at forks above it."""
        return [math.prod(1 / len(self._below[segment]) for segment in path) for path in self.paths]

    def of_turns(self, values: dict[int, float]) -> Tensor:
        """Turn segments' values into turns', (N, K) or (N,) float64; 0 where there is no turn."""
        table = self._turns.new_zeros(int(self._turns.max()) + 2).double()  # last: 0, for no turn
        for segment, value in values.items():
            if not isinstance(segment, tuple):
                table[segment] = value
        return table[self._turns]
