"""DAPO: decoupled clip and dynamic sampling policy optimization (Yu et al. 2025, arXiv:2503.14476).

Here: clip-higher (section 3.1), token-level loss (3.3), soft overlong punishment (3.4, equation 13)
and, as an option, overlong filtering (3.4); `loss: cispo` is the loss of MiniMax-M1
(arXiv:2506.13585), which weighs tokens as DAPO does. Dynamic sampling (3.2) is the scheduler's, if
`algorithm.dynamic_sampling` is true: it decides which prompts to roll out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from rose.trainer.algorithms.base import (
    AboveOne,
    ClipLow,
    Count,
    CountOrZero,
    NonNegative,
    Summary,
    TokenBatch,
)
from rose.trainer.algorithms.surrogate import (
    clipped_surrogate,
    clipped_weights,
    group_advantages,
    token_mean_weights,
)
from rose.trainer.importance import log_ratio

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Dapo:
    """DAPO's loss, with a soft punishment for trajectories close to their token limit.

    The punishment grows from 0 to -1 over the last `overlong_buffer` tokens before the limit. None
    means a fifth of the limit, as in the paper, and 0 switches it off. The limit is
    `max_response_tokens` of a whole trajectory; None means, for each trajectory, the run's limit
    that it came closest to (`Summary.limits`). With `overlong_filtering` trajectories that a token
    limit truncated have no loss, since their reward says more about the limit than about the
    answer. Trajectories that used up their turns keep their loss."""

    clip_low: ClipLow
    clip_high: NonNegative
    max_response_tokens: Count | None
    overlong_buffer: CountOrZero | None
    overlong_filtering: bool
    dual_clip: AboveOne | None = None
    loss: Literal["clip", "cispo"] = "clip"

    recompute_proximal: ClassVar[bool] = True
    corrects_mismatch: ClassVar[bool] = False
    group_relative: ClassVar[bool] = True

    def __post_init__(self) -> None:
        most, buffer = self.max_response_tokens, self.overlong_buffer
        if most is not None and buffer is not None and buffer > most:
            raise ValueError(
                f"algorithm.args.overlong_buffer={self.overlong_buffer}: must not be more than "
                f"algorithm.args.max_response_tokens={self.max_response_tokens}"
            )
        if self.loss == "cispo" and self.dual_clip is not None:
            raise ValueError(
                f"algorithm.args.dual_clip={self.dual_clip:g}: loss=cispo has no ratio that it "
                "could bound; null is right"
            )

    def overlong_punishment(self, summary: Summary) -> Tensor:
        """Compute equation 13: (N,) float32 in [-1, 0]."""
        if self.overlong_buffer == 0:
            return summary.rewards * 0
        if self.max_response_tokens is None:
            made, most = summary.limits.float().unbind(1)
        else:
            made = summary.response_tokens.float()
            most = made.new_tensor(self.max_response_tokens)
        buffer = most / 5 if self.overlong_buffer is None else most.clamp(max=self.overlong_buffer)
        return ((most - buffer - made) / buffer).clamp(-1, 0)

    def advantages(self, summary: Summary) -> Tensor:
        shaped = summary.rewards + self.overlong_punishment(summary)
        return group_advantages(shaped, summary.groups, scale_by_std=True)

    def token_weights(self, summary: Summary) -> Tensor:
        """Weigh every response token of the batch alike (equation 8)."""
        keep = ~summary.truncated if self.overlong_filtering else None
        return token_mean_weights(summary.response_tokens, keep)

    def token_loss(self, batch: TokenBatch) -> tuple[Tensor, dict[str, Tensor]]:
        ratios = log_ratio(batch.logprobs, batch.proximal, batch.mask)
        if self.loss == "cispo":
            return clipped_weights(ratios, batch, self.clip_low, self.clip_high)
        return clipped_surrogate(ratios, batch, self.clip_low, self.clip_high, self.dual_clip)
