"""GSPO: group sequence policy optimization (Zheng et al. 2025, arXiv:2507.18071).

The importance ratio is that of the whole trajectory, s = (pi(y) / pi_old(y))^(1/|y|) (equation 7),
and it is clipped as a whole. The gradient flows through every token of s (equation 5). GSPO-token,
the paper's other form, has the same gradient if a trajectory has one advantage, as here. If an
agent branches, each branch is a row with its own ratio, over its own tokens, and its own clip.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from rose.trainer.algorithms.base import ClipLow, NonNegative, Summary, TokenBatch
from rose.trainer.algorithms.surrogate import (
    clipped_surrogate,
    group_advantages,
    sequence_mean_weights,
)
from rose.trainer.importance import log_ratio

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Gspo:
    clip_low: ClipLow
    clip_high: NonNegative

    recompute_proximal: ClassVar[bool] = True
    corrects_mismatch: ClassVar[bool] = False
    group_relative: ClassVar[bool] = True

    def advantages(self, summary: Summary) -> Tensor:
        return group_advantages(summary.rewards, summary.groups, scale_by_std=True)

    def token_weights(self, summary: Summary) -> Tensor:
        """Weigh by the mean over tokens, since every token of a row has the row's whole loss."""
        return sequence_mean_weights(summary)

    def token_loss(self, batch: TokenBatch) -> tuple[Tensor, dict[str, Tensor]]:
        ratios = log_ratio(batch.logprobs, batch.proximal, batch.mask)
        tokens = batch.mask.sum(-1, keepdim=True).clamp(min=1)  # (B, 1)
        mean = ratios.sum(-1, keepdim=True) / tokens
        return clipped_surrogate(mean, batch, self.clip_low, self.clip_high)
