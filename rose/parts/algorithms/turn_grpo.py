"""Turn-level GRPO: a turn's advantage mixes the advantage of its return-to-go with the
trajectory's.

For turn k of trajectory i, with rewards r of turns, R[i, k] = sum over l >= k of gamma^(l - k)
r[i, l], and

    A[i, k] = (1 - w) * normalised(R[i, k]) + w * normalised(reward[i])

where both terms are normalised as in GRPO, (x - mean) / std within the group, and w is
`trajectory_weight`. Mixing a turn's and an outcome's advantage is MT-GRPO's idea (Zeng et al. 2025,
arXiv:2505.11821), here at GRPO's scale. w = 0.5 weighs both alike, as MT-GRPO does, and GiGPO (Feng
et al. 2025, arXiv:2505.10978) with omega = 1. For trajectories of one turn the algorithm is GRPO.

R[i, k] is compared with the returns of the group's other trajectories at the same turn k, as
MT-GRPO compares a turn's rewards. A baseline over all turns of the group would ignore that returns
shrink as rewards are collected. Early turns would seem good and late ones bad, whatever was done in
them. Trajectories that ended before turn k are not compared. If only one trajectory is left, or all
returns are equal, the turn's term is 0 and only the trajectory's counts. In MT-GRPO the turn's term
has only the turn's reward, and the number of turns is fixed; here a turn is also credited with
later rewards. Left out: GiGPO's groups of turns in the same state, which environments would need to
name.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

import msgspec

from rose.trainer.algorithms.base import Summary
from rose.trainer.algorithms.grpo import Grpo
from rose.trainer.algorithms.surrogate import group_advantages

if TYPE_CHECKING:
    from torch import Tensor

Share = Annotated[float, msgspec.Meta(ge=0, le=1)]


@dataclass(frozen=True)
class TurnGrpo(Grpo):
    """Turn-level GRPO, with GRPO's loss and weights. `gamma` discounts by turns, not tokens."""

    gamma: Share
    trajectory_weight: Share

    needs_turn_rewards: ClassVar[bool] = True

    def advantages(self, summary: Summary) -> Tensor:
        """Compute (N, K) float32. The turn's term is 0 behind a trajectory's last turn. Raises
        `ValueError` for a trajectory without rewards of turns."""
        rewards = summary.turn_rewards
        if rewards is None:
            rewards = summary.rewards.new_full((len(summary.rewards), 1), math.nan).double()
        spoke = summary.response_tokens > 0  # no turn if the prompt is longer than the context
        if (rewards.isnan().all(1) & spoke).any():
            raise ValueError(
                "algorithm=turn_grpo: the batch has trajectories without rewards of turns"
            )
        returns = returns_to_go(rewards, self.gamma)
        made = ~returns.isnan()
        turns = returns.shape[1]
        number = summary.groups.new_ones(turns).cumsum(0) - 1  # 0 to K - 1
        same_turn = summary.groups[:, None] * turns + number  # (N, K)
        of_turns = returns.new_zeros(returns.shape).float()
        of_turns[made] = group_advantages(returns[made], same_turn[made], self.scale_by_std)
        outcome = group_advantages(summary.rewards, summary.groups, self.scale_by_std)
        return of_turns.lerp(outcome[:, None].expand_as(of_turns), self.trajectory_weight)


def returns_to_go(rewards: Tensor, gamma: float) -> Tensor:
    """Compute returns from turns' rewards, both (N, K) float64 with NaN where there is no turn."""
    returns, later = rewards.clone(), 0.0
    for k in reversed(range(rewards.shape[1])):
        returns[:, k] += gamma * later
        later = returns[:, k].nan_to_num(0.0)
    return returns
