"""REINFORCE++ (Hu et al. 2025, arXiv:2501.03262), and its variant REINFORCE++-baseline.

Advantages are normalised over the whole batch instead of within the group, which is unbiased where
a group's standard deviation is not. `baseline: none` is REINFORCE++; `baseline: group` first takes
off the group's mean reward (REINFORCE++-baseline).
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

    def advantages(self, summary: Summary) -> Tensor:
        """(A - mean) / std over the tokens of the batch, where a trajectory's tokens share its A:
        so a trajectory counts as often as it has response tokens, as in OpenRLHF; 0 if all A are
        equal."""
        rewards = summary.rewards.double()
        values = centred(rewards, summary.groups) if self.baseline == "group" else rewards
        # (N,), sums to 1
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
