"""RLOO: REINFORCE leave-one-out (Ahmadian et al. 2024, Back to Basics, arXiv:2402.14740).

The baseline of a trajectory is the mean reward of the others of its group; the whole trajectory is
one action, so log-probabilities are summed over its tokens, not averaged. Without a clip range the
loss is plain REINFORCE, for one update per batch; with one it is PPO's on the ratio of the whole
trajectory (as TRL's RLOOTrainer), for several. Of an agent's branches each is a row with a ratio of
its own, clipped by itself (docs/agents.md); its tokens weigh as any others.
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
    """Both clips null: REINFORCE. Both numbers: clipped trajectory ratio."""

    clip_low: ClipLow | None
    clip_high: NonNegative | None

    recompute_proximal: ClassVar[bool] = True
    corrects_mismatch: ClassVar[bool] = False

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
        """r_i - mean of the others = n / (n - 1) * (r_i - group mean); 0 in a group of one."""
        size = group_sizes(summary.groups)
        return (centred(summary.rewards, summary.groups) * size / (size - 1).clamp(min=1)).float()

    def token_weights(self, summary: Summary) -> Tensor:
        """Sum over tokens, mean over trajectories."""
        rows = len(summary.rewards)
        return summary.rewards.new_full((rows,), 1 / max(1, rows)).float()

    def token_loss(self, batch: TokenBatch) -> tuple[Tensor, dict[str, Tensor]]:
        if self.clip_low is None:
            logprobs = batch.logprobs.masked_fill(batch.mask == 0, 0.0)
            return -batch.advantages[:, None] * logprobs, {}
        total = log_ratio(batch.logprobs, batch.proximal, batch.mask).sum(-1, keepdim=True)
        total = total.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)  # (B, 1)
        loss, statistics = clipped_surrogate(total, batch, self.clip_low, self.clip_high)
        # it stands at every token of its row: their mean gives it back once. The row's tokens, not
        # the trajectory's, or a token would count for less where an agent has branched
        return loss / batch.mask.sum(-1, keepdim=True).clamp(min=1), statistics
