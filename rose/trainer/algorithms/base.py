"""The interface of an algorithm: three pure functions on tensors, which know no ranks or engines.

The trainer computes, with N trajectories in the whole batch,

    loss = sum_i token_weights[i] * sum_t importance[i,t] * token_loss(...)[i,t]

so gradient accumulation, ZeRO and the number of ranks never change the result, and a new
algorithm changes no trainer code. `importance` is the truncated importance weight between engine
and trainer (`rose.trainer.importance`). It is 1 if the algorithm corrects the mismatch itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Protocol

import msgspec

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Summary:
    """The whole batch of N trajectories in G groups, the same on every trainer rank."""

    rewards: Tensor  # (N,) float64
    groups: Tensor  # (N,) int64 in [0, G)
    response_tokens: Tensor  # (N,) int64
    truncated: Tensor  # (N,) bool: True if a limit of tokens, not of turns, ended the trajectory
    # (N, K) float64, K turns at most: each turn's reward, NaN behind a trajectory's last turn and
    # where the environment gives none; None if no trajectory has any
    turn_rewards: Tensor | None = None
    # (N, K) int64: each turn's segment (`rose.trainer.segments`), -1 behind a trajectory's last
    # turn; None in a batch without forks
    segments: Tensor | None = None
    # (N, 2) int64: number of the policy's tokens, and its limit, for the token limit that the
    # trajectory came closest to
    limits: Tensor | None = None


@dataclass(frozen=True)
class TokenBatch:
    """A micro-batch of B rows, right-padded to T predicted tokens."""

    logprobs: Tensor  # (B, T) float32: the policy being trained, with gradient
    proximal: Tensor  # (B, T) float32: the policy at the start of the step, or `behaviour`
    behaviour: Tensor  # (B, T) float32: the engine's log-probabilities when it sampled
    advantages: Tensor  # (B,) float32; (B, T) if the algorithm gives one to each turn
    mask: Tensor  # (B, T) float32, 1 where the policy generated the token


class Algorithm(Protocol):
    # True: `proximal` is computed at the start of a step. False: it is `behaviour`, as in PPO.
    recompute_proximal: bool
    corrects_mismatch: bool  # True: token_loss weighs by proximal / behaviour, so importance is 1

    def advantages(self, summary: Summary) -> Tensor:
        """Compute advantages, (N,), or (N, K) with one for each turn. The trainer converts them,
        and the weights, to float32. An algorithm declares by class variables:
        - `needs_turn_rewards = True`: it needs rewards of turns. A run without them is rejected.
        - `advantages_of_batch = True`: they depend on other groups. `trainer.stream` is rejected.
        - `group_relative = True`: advantages are 0 in a group of one. Such groups are rejected."""

    def token_weights(self, summary: Summary) -> Tensor:
        """Compute the weight in the batch's loss of each response token of a trajectory, (N,), or
        of each token of a turn, (N, K). With `trains_segments = True` a segment's tokens are
        trained once, in its first trajectory."""

    def token_loss(self, batch: TokenBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss before weights, (B, T), and statistics: scalar tensors, each a sum over
        the mask's tokens, which the trainer divides by the batch's number of response tokens. With
        `one_update = True` the loss has no ratio to the proximal policy. Then it is right only for
        a step's first update, and `trainer.updates_per_step` above 1 is rejected."""


# A reward counts as equal to its group's mean if it differs by less than this share of the mean (or
# of 1, for means below 1). Rounding of float64 sums, as 0.1 + 0.1 + 0.1 against 0.3, is smaller.
ROUNDING = 1e-12


def differ(rewards: Sequence[float]) -> bool:
    """True if a group's rewards differ by more than rounding. Else its advantages are all 0."""
    mean = math.fsum(rewards) / len(rewards)
    return any(abs(reward - mean) > ROUNDING * max(1.0, abs(mean)) for reward in rewards)


def without_rounding(differences: Tensor, means: Tensor) -> Tensor:
    """Set differences of rewards from `means` to exactly 0 if they are no more than rounding."""
    return differences.masked_fill(differences.abs() <= ROUNDING * means.abs().clamp(min=1), 0.0)


def group_mean(values: Tensor, groups: Tensor) -> Tensor:
    """Return the mean of `values`, (N,), over each row's group: (N,)."""
    size = int(groups.max()) + 1 if groups.numel() else 0
    total = values.new_zeros(size).index_add_(0, groups, values)
    count = values.new_zeros(size).index_add_(0, groups, values.new_ones(len(values)))
    return (total / count.clamp(min=1))[groups]


NonNegative = Annotated[float, msgspec.Meta(ge=0)]
Positive = Annotated[float, msgspec.Meta(gt=0)]
# Below 1, since 1 - clip_low is a bound of a ratio, which is positive.
ClipLow = Annotated[float, msgspec.Meta(ge=0, lt=1)]
AboveOne = Annotated[float, msgspec.Meta(gt=1)]
Count = Annotated[int, msgspec.Meta(ge=1)]
CountOrZero = Annotated[int, msgspec.Meta(ge=0)]
