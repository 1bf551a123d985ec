"""The gap between engine and trainer: how large it is, and the weight that corrects for it.

vLLM and the trainer compute the same policy with different kernels. So the log-probabilities from
which the tokens were sampled differ from the trainer's, and more so for tokens of an older
policy version. Truncated importance sampling multiplies each token's loss by min(proximal /
behaviour, cap) (Ionides 2008; Yao et al. 2025, "Your efficient RL framework secretly brings you
off-policy RL training").
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import Tensor


# Largest log ratio: exp(20) = 5e8 is beyond any cap or clip range, and finite in float32.
LOG_RATIO_LIMIT = 20.0


def log_ratio(new: Tensor, old: Tensor, mask: Tensor) -> Tensor:
    """Return log(new / old), (B, T). Value and gradient are exactly 0 where mask is 0."""
    return (new - old).masked_fill(mask == 0, 0.0).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


@dataclass(frozen=True)
class Bounds:
    """The bounds of the weights: `algorithm.importance_cap`, `importance_floor` and
    `importance_level`.

    Without a `cap` there is no correction: every weight is 1. With a `cap` alone, a larger weight
    is cut to it. With a `floor` as well, a weight outside of these bounds is 0 (IcePop; Ling Team
    2025, arXiv:2510.18855). With `level` "sequence" all tokens of a row have one weight, the
    product of their ratios (TRL's `sequence_truncate` and, with a floor, `sequence_mask`)."""

    cap: float | None = None
    floor: float | None = None
    level: Literal["token", "sequence"] = "token"


def importance_weights(proximal: Tensor, behaviour: Tensor, mask: Tensor, bounds: Bounds) -> Tensor:
    """Return exp(proximal - behaviour), bounded as `Bounds` says: (B, T) float32 without gradient,
    0 where mask is 0.

    `proximal` and `behaviour` are (B, T) log-probabilities of the trainer and of the engine."""
    if bounds.cap is None:
        return mask.float()
    ratio = _ratios(proximal, behaviour, mask, bounds)
    if bounds.floor is None:
        return ratio.clamp(max=bounds.cap) * mask
    return ratio.masked_fill((ratio > bounds.cap) | (ratio < bounds.floor), 0.0) * mask


def _ratios(proximal: Tensor, behaviour: Tensor, mask: Tensor, bounds: Bounds) -> Tensor:
    """Compute the ratios proximal / behaviour: (B, T) of tokens, or (B, 1) of whole rows."""
    logs = log_ratio(proximal.detach(), behaviour.detach(), mask)
    if bounds.level == "sequence":
        logs = logs.sum(-1, keepdim=True).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return logs.exp()


NO_BOUNDS = Bounds()


def mismatch(
    proximal: Tensor, behaviour: Tensor, mask: Tensor, bounds: Bounds = NO_BOUNDS
) -> dict[str, Tensor]:
    """Measure the gap between engine and trainer over the response tokens of (B, T)
    log-probabilities. Returns scalar float32 tensors:

    - `kl_k3`: an unbiased estimate of KL(behaviour || proximal) in nats that is never negative
      (Schulman 2020, "Approximating KL divergence"); summed in float64: its terms nearly cancel;
    - `abs_diff`: absolute differences of log-probabilities;
    - `capped`: the number of tokens whose weight is cut to the cap, or set to 0;
    - `ratio_max`: the largest proximal / behaviour; 0 without tokens. Combine several by max.

    Add the first three over micro-batches and ranks, then divide by the number of tokens."""
    logs = log_ratio(proximal.detach(), behaviour.detach(), mask)
    ratio = logs.exp() * mask
    exact = logs.double()
    weights = _ratios(proximal, behaviour, mask, bounds)
    above = weights > (math.inf if bounds.cap is None else bounds.cap)
    below = weights < (0.0 if bounds.floor is None else bounds.floor)
    return {
        "kl_k3": (exact.expm1() - exact).sum().float(),
        "abs_diff": logs.abs().sum(),
        "capped": ((above | below) * mask).sum(),
        "ratio_max": ratio.max() if ratio.numel() else ratio.sum(),
    }
