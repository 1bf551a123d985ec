"""RLOO: REINFORCE leave-one-out (Ahmadian et al. 2024, Back to Basics, arXiv:2402.14740).

The baseline of a trajectory is the mean reward of its group's other trajectories. The whole
trajectory is one action, so log-probabilities are summed over its tokens, not averaged. Without a
clip range the loss is plain REINFORCE, for one update per batch. With a clip range it is PPO's loss
on the ratio of the whole trajectory (as in TRL's RLOOTrainer), for several updates. If an agent
branches, each branch is a row with its own ratio and clip (docs/agents.md), and all tokens weigh
the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from rose.trainer.algorithms.base import ClipLow, NonNegative, Summary, TokenBatch
from rose.trainer.algorithms.surrogate import centred, clipped_surrogate, group_sizes
from rose.trainer.importance import LOG_RATIO_LIMIT, log_ratio

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Rloo:
    clip_low: ClipLow | None
    clip_high: NonNegative | None

    recompute_proximal: ClassVar[bool] = True
    corrects_mismatch: ClassVar[bool] = False
    group_relative: ClassVar[bool] = True

    @property
    def one_update(self) -> bool:
        return self.clip_low is None

    def __post_init__(self) -> None:
        if (self.clip_low is None) != (self.clip_high is None):
            raise ValueError(
                f"algorithm.args.clip_low={self.clip_low}: must be null (REINFORCE) or a number "
                f"together with algorithm.args.clip_high={self.clip_high}"
            )

    def advantages(self, summary: Summary) -> Tensor:
        """Compute r_i - mean of the others = n / (n - 1) * (r_i - group mean); 0 if n = 1."""
        size = group_sizes(summary.groups)
        return (centred(summary.rewards, summary.groups) * size / (size - 1).clamp(min=1)).float()

    def token_weights(self, summary: Summary) -> Tensor:
        """Weigh all tokens by 1 / N: a sum over tokens, and a mean over trajectories."""
        rows = len(summary.rewards)
        return summary.rewards.new_full((rows,), 1 / max(1, rows)).float()

    def token_loss(self, batch: TokenBatch) -> tuple[Tensor, dict[str, Tensor]]:
        if self.clip_low is None:
            logprobs = batch.logprobs.masked_fill(batch.mask == 0, 0.0)
            return -batch.advantages[:, None] * logprobs, {}
        total = log_ratio(batch.logprobs, batch.proximal, batch.mask).sum(-1, keepdim=True)
        total = total.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)  # (B, 1)
        loss, statistics = clipped_surrogate(total, batch, self.clip_low, self.clip_high)
        # Every token of a row has the row's whole loss, so divide by the row's number of tokens.
        # The trajectory's number would give tokens less weight if an agent has branched.
        return loss / batch.mask.sum(-1, keepdim=True).clamp(min=1), statistics
