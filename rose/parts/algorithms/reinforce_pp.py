"""REINFORCE++ (Hu et al. 2025, arXiv:2501.03262), and its variant REINFORCE++-baseline.

Advantages are normalised over the whole batch, since dividing by a group's standard deviation is
biased. `baseline: none` is REINFORCE++; `baseline: group` first subtracts the group's mean reward
(REINFORCE++-baseline).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

import msgspec

from rose.trainer.algorithms.base import ClipLow, NonNegative, Summary, TokenBatch, without_rounding
from rose.trainer.algorithms.surrogate import (
    STD_EPSILON,
    centred,
    clipped_surrogate,
    token_mean_weights,
)
from rose.trainer.importance import log_ratio

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class ReinforcePP:
    clip_low: ClipLow
    clip_high: NonNegative
    baseline: Annotated[str, msgspec.Meta(pattern="^(none|group)$")]

    recompute_proximal: ClassVar[bool] = True
    corrects_mismatch: ClassVar[bool] = False
    advantages_of_batch: ClassVar[bool] = True

    @property
    def group_relative(self) -> bool:
        return self.baseline == "group"

    def advantages(self, summary: Summary) -> Tensor:
        """Compute (A - mean) / std, where A is the trajectory's reward, less the group's mean with
        `baseline: group`. Mean and std are over the batch's tokens, so a trajectory counts once for
        each response token, as in OpenRLHF. 0 if A is constant."""
        rewards = summary.rewards.double()
        values = centred(rewards, summary.groups) if self.baseline == "group" else rewards
        # (N,): each trajectory's share of the batch's tokens
        share = summary.response_tokens.double() / summary.response_tokens.sum().clamp(min=1)
        mean = (values * share).sum()
        difference = without_rounding(values - mean, mean)
        std = (difference.square() * share).sum().sqrt()
        return (difference / (std + STD_EPSILON)).float()

    def token_weights(self, summary: Summary) -> Tensor:
        return token_mean_weights(summary.response_tokens)

    def token_loss(self, batch: TokenBatch) -> tuple[Tensor, dict[str, Tensor]]:
        ratios = log_ratio(batch.logprobs, batch.proximal, batch.mask)
        return clipped_surrogate(ratios, batch, self.clip_low, self.clip_high)
