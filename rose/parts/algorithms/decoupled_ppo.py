"""Decoupled PPO for stale data (Hilton et al. 2021, arXiv:2110.00641; AReaL, Fu et al. 2025,
arXiv:2505.24298).

The trust region is around the proximal policy (the one at the start of the step), even if an older
policy, the behaviour policy, generated the tokens. The weight proximal / behaviour corrects for the
tokens' age and for the mismatch between engine and trainer (AReaL equation 5). The baseline is the
group's mean reward instead of a critic.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from rose.trainer.algorithms.base import ClipLow, NonNegative, Positive, Summary, TokenBatch
from rose.trainer.algorithms.surrogate import (
    clipped_surrogate,
    group_advantages,
    token_mean_weights,
)
from rose.trainer.importance import log_ratio

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class DecoupledPpo:
    """Decoupled PPO. A token whose weight exceeds `weight_cap` gets no loss, as in AReaL's code,
    but still counts in the mean."""

    clip_low: ClipLow
    clip_high: NonNegative
    weight_cap: Positive
    scale_by_std: bool

    recompute_proximal: ClassVar[bool] = True
    corrects_mismatch: ClassVar[bool] = True
    group_relative: ClassVar[bool] = True

    def advantages(self, summary: Summary) -> Tensor:
        return group_advantages(summary.rewards, summary.groups, self.scale_by_std)

    def token_weights(self, summary: Summary) -> Tensor:
        return token_mean_weights(summary.response_tokens)

    def token_loss(self, batch: TokenBatch) -> tuple[Tensor, dict[str, Tensor]]:
        ratios = log_ratio(batch.logprobs, batch.proximal, batch.mask)
        loss, statistics = clipped_surrogate(ratios, batch, self.clip_low, self.clip_high)
        weight = log_ratio(batch.proximal, batch.behaviour, batch.mask).exp().detach()
        above = weight > self.weight_cap
        statistics |= {"weight_masked": (above * batch.mask).sum()}
        return loss * weight.masked_fill(above, 0.0), statistics
