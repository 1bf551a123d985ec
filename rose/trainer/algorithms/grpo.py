"""GRPO: group relative policy optimization (Shao et al. 2024, DeepSeekMath, arXiv:2402.03300).

The baseline is the group's mean reward, so there is no critic. `algorithm.kl_coef` weighs the KL
penalty to a reference model. It is 0 by default, as in most agent RL (DAPO section 2.3, Dr. GRPO).
`scale_by_std: false` gives the advantage of Dr. GRPO (Liu et al. 2025, arXiv:2503.20783, section
3.2). `normaliser` gives its loss; set it to the most tokens that a trajectory can have.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from rose.trainer.algorithms.base import AboveOne, ClipLow, Count, NonNegative, Summary, TokenBatch
from rose.trainer.algorithms.surrogate import (
    clipped_surrogate,
    group_advantages,
    sequence_mean_weights,
)
from rose.trainer.importance import log_ratio

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Grpo:
    clip_low: ClipLow
    clip_high: NonNegative
    scale_by_std: bool
    normaliser: Count | None = field(default=None, kw_only=True)
    dual_clip: AboveOne | None = field(default=None, kw_only=True)

    recompute_proximal: ClassVar[bool] = True
    corrects_mismatch: ClassVar[bool] = False
    group_relative: ClassVar[bool] = True

    def advantages(self, summary: Summary) -> Tensor:
        return group_advantages(summary.rewards, summary.groups, self.scale_by_std)

    def token_weights(self, summary: Summary) -> Tensor:
        """Weigh as equation 3: the mean over each trajectory's tokens, then over trajectories."""
        return sequence_mean_weights(summary, self.normaliser)

    def token_loss(self, batch: TokenBatch) -> tuple[Tensor, dict[str, Tensor]]:
        ratios = log_ratio(batch.logprobs, batch.proximal, batch.mask)
        return clipped_surrogate(ratios, batch, self.clip_low, self.clip_high, self.dual_clip)
