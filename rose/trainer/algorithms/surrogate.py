"""Terms of which the algorithms are composed: advantages, weights, clipped surrogate.

Advantages are computed in float64. A group whose rewards are equal but for rounding has a standard
deviation of exactly 0, so that 1 / std never amplifies rounding.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rose.trainer.algorithms.base import Summary, TokenBatch, group_mean, without_rounding

if TYPE_CHECKING:
    from torch import Tensor

STD_EPSILON = 1e-6  # added to a standard deviation of rewards, as in verl: far below any scale


def centred(rewards: Tensor, groups: Tensor) -> Tensor:
    """Subtract the group's mean from rewards: (N,) float64, exactly 0 if only rounding is left."""
    rewards = rewards.double()
    means = group_mean(rewards, groups)
    return without_rounding(rewards - means, means)


def group_sizes(groups: Tensor) -> Tensor:
    """Return the number of rows in each row's group, (N,) float64."""
    return groups.bincount()[groups].double()


def group_advantages(rewards: Tensor, groups: Tensor, scale_by_std: bool) -> Tensor:
    """Compute GRPO's advantage (r - mean) / std within the group, (N,) float32.

    `std` is the sample standard deviation (n - 1), as in TRL and verl. In a group of one, or one
    whose rewards are all equal, no trajectory is better than another, so all advantages are 0."""
    difference = centred(rewards, groups)
    if scale_by_std:
        difference = difference / (group_std(rewards, groups) + STD_EPSILON)
    return difference.float()


def group_std(rewards: Tensor, groups: Tensor) -> Tensor:
    """Return the sample standard deviation of rewards in each row's group, (N,) float64; 0 for a
    group of one row."""
    size = group_sizes(groups)
    variance = group_mean(centred(rewards, groups).square(), groups) * size
    return (variance / (size - 1).clamp(min=1)).sqrt()


def sequence_mean_weights(summary: Summary, normaliser: int | None = None) -> Tensor:
    """Weights of a mean over tokens, then over N trajectories: (N,) 1 / (N * tokens), 0 without
    tokens. With a `normaliser`, 1 / (N * normaliser) for any length (Dr. GRPO, arXiv:2503.20783,
    section 3.2)."""
    tokens = summary.response_tokens
    by = tokens.clamp(min=1) if normaliser is None else normaliser
    return (tokens > 0).float() / (by * max(1, len(tokens)))


def token_mean_weights(response_tokens: Tensor, keep: Tensor | None = None) -> Tensor:
    """Weights of a mean over the response tokens of the rows in `keep` (N,) bool: (N,) 1 / their
    number, and 0 for other rows."""
    kept = response_tokens.new_ones(len(response_tokens)) if keep is None else keep.long()
    return kept.float() / (response_tokens * kept).sum().clamp(min=1)


def clipped_surrogate(
    log_ratios: Tensor,
    batch: TokenBatch,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute PPO's pessimistic loss -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), (B, T), 0
    where mask is 0. With `dual_clip` c the loss of a negative advantage is at most -c A (Ye et al.
    2020, arXiv:1912.09729, equation 5); PPO does not bound it.

    `log_ratios` is (B, T), or (B, 1) for one ratio per trajectory. Statistics: `clip_fraction`
    (tokens whose gradient is clipped), `ratio`, and `policy_kl` (k3 of KL(proximal || policy))."""
    ratio = log_ratios.exp()
    advantages = batch.advantages.view(len(batch.mask), -1)  # (B, 1), or (B, T)
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    loss = -(ratio * advantages).minimum(clipped * advantages)
    above, below = ratio > 1 + clip_high, ratio < 1 - clip_low
    cut = (above & (advantages > 0)) | (below & (advantages < 0))
    if dual_clip is not None:
        far = (ratio > dual_clip) & (advantages < 0)
        loss, cut = loss.where(~far, -dual_clip * advantages), cut | far
    return loss * batch.mask, _statistics(log_ratios, cut, batch)


def clipped_weights(
    log_ratios: Tensor, batch: TokenBatch, clip_low: float, clip_high: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute CISPO's loss -sg(clip(r, 1 - clip_low, 1 + clip_high)) A log pi, (B, T), 0 where mask
    is 0 (MiniMax-M1, arXiv:2506.13585, equation 4). It clips a token's weight, so that every token
    keeps a gradient. Arguments and statistics are those of `clipped_surrogate`."""
    ratio = log_ratios.detach().exp()
    advantages = batch.advantages.view(len(batch.mask), -1)  # (B, 1), or (B, T)
    weight = ratio.clamp(1 - clip_low, 1 + clip_high)
    loss = -(weight * advantages) * batch.logprobs.masked_fill(batch.mask == 0, 0.0)
    return loss * batch.mask, _statistics(log_ratios, weight != ratio, batch)


def _statistics(log_ratios: Tensor, cut: Tensor, batch: TokenBatch) -> dict[str, Tensor]:
    """Sum the statistics over the tokens. `cut` marks the tokens to which the clip applied."""
    ratio, log_ratios = log_ratios.detach().exp(), log_ratios.detach()
    return {
        "clip_fraction": (cut * batch.mask).sum(),
        "ratio": (ratio * batch.mask).sum(),
        "policy_kl": ((ratio - 1 - log_ratios) * batch.mask).sum(),
    }
