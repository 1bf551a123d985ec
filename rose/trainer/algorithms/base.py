"""What an algorithm is: three pure functions on tensors, and no knowledge of ranks or engines.

The trainer computes, with N trajectories in the whole batch,

    loss = sum_i token_weights[i] * sum_t importance[i,t] * token_loss(...)[i,t]

so gradient accumulation, ZeRO and the number of ranks never change the result, and a new
algorithm touches no trainer code. `importance` is the truncated importance weight between engine
and trainer (`rose.trainer.importance`); it is 1 where the algorithm corrects by itself.
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
    truncated: Tensor  # (N,) bool: by a limit of tokens, not of turns
    # (N, K) float64, K turns at most: of each turn, NaN behind a trajectory's last and where the
    # environment gives none
    turn_rewards: Tensor | None = None
    # (N, K) int64: of each turn, its segment (`rose.trainer.segments`), -1 behind a trajectory's
    # last; None in a batch without forks
    segments: Tensor | None = None
    # (N, 2) int64: tokens of the policy and the most that there could be, by the limit that the
    # trajectory came closest to
    limits: Tensor | None = None


@dataclass(frozen=True)
class TokenBatch:
    """One micro-batch of B trajectories, right-padded to T predicted tokens."""

    logprobs: Tensor  # (B, T) float32: the policy being trained, with gradient
    proximal: Tensor  # (B, T) float32: the policy at the start of the step, or the engine's
    behaviour: Tensor  # (B, T) float32: what the engine reported when it sampled
    advantages: Tensor  # (B,) float32; (B, T) of an algorithm whose advantages are of turns
    mask: Tensor  # (B, T) float32, 1 where the policy made the token


class Algorithm(Protocol):
    recompute_proximal: bool  # else proximal = behaviour (PPO epochs over fresh data)
    corrects_mismatch: bool  # token_loss weighs by proximal/behaviour; no importance on top

    def advantages(self, summary: Summary) -> Tensor:
        """(N,), or (N, K) with one for each turn; whose algorithm says so by
        `needs_turn_rewards = True`, so that a run without them is refused. With
        `advantages_of_batch = True` they depend on more than the trajectory's group, so that
        `trainer.stream` is refused. The trainer takes them, and the weights, as float32."""

    def token_weights(self, summary: Summary) -> Tensor:
        """(N,): the weight of each response token of trajectory i in the batch's loss; or
        (N, K), of each turn's tokens. With `trains_segments = True` a segment's tokens are trained
        once, in its first trajectory."""

    def token_loss(self, batch: TokenBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """((B, T) loss before weights; statistics as masked sums (scalar tensors), which the
        trainer divides by the number of response tokens of the batch). With `one_update = True`
        the loss has no ratio to the proximal policy, so that it is right for the first update of a
        step alone, and `trainer.updates_per_step` above 1 is refused."""


# Rewards that differ from their group's mean by less than this share of it (of 1, for means below
# 1) are equal to it. Two orders of one sum of float64 numbers, as 0.1 + 0.1 + 0.1 and 0.3, differ
# by less.
ROUNDING = 1e-12


def differ(rewards: Sequence[float]) -> bool:
    """True if the rewards of a group differ by more than rounding. Otherwise all advantages that
    compare them are 0."""
    mean = math.fsum(rewards) / len(rewards)
    return any(abs(reward - mean) > ROUNDING * max(1.0, abs(mean)) for reward in rewards)


def without_rounding(differences: Tensor, means: Tensor) -> Tensor:
    """The differences of rewards from `means`, exactly 0 where `differ` takes them for equal."""
    return differences.masked_fill(differences.abs() <= ROUNDING * means.abs().clamp(min=1), 0.0)


def group_mean(values: Tensor, groups: Tensor) -> Tensor:
    """(N,) values, (N,) int64 groups -> (N,): each row's group mean."""
    size = int(groups.max()) + 1 if groups.numel() else 0
    total = values.new_zeros(size).index_add_(0, groups, values)
    count = values.new_zeros(size).index_add_(0, groups, values.new_ones(len(values)))
    return (total / count.clamp(min=1))[groups]


NonNegative = Annotated[float, msgspec.Meta(ge=0)]
Positive = Annotated[float, msgspec.Meta(gt=0)]
# a ratio is positive: 1 - clip_low must be too
ClipLow = Annotated[float, msgspec.Meta(ge=0, lt=1)]
AboveOne = Annotated[float, msgspec.Meta(gt=1)]
Count = Annotated[int, msgspec.Meta(ge=1)]
CountOrZero = Annotated[int, msgspec.Meta(ge=0)]
