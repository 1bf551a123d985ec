"""The gap between engine and trainer: how large it is, and the weight that corrects for it.

vLLM and the trainer compute the same policy with other kernels, so the log-probabilities that
sampled the tokens differ from those that the gradient sees, and more so for tokens of an older
policy version. Truncated importance sampling multiplies each token's loss by min(proximal /
behaviour, cap) (Ionides 2008; Yao et al. 2025, "Your efficient RL framework secretly brings you
off-policy RL training").
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


LOG_RATIO_LIMIT = 20.0  # exp(20) = 5e8: beyond any cap or clip range, and finite in float32


def log_ratio(new: Tensor, old: Tensor, mask: Tensor) -> Tensor:
    """log(new / old), (B, T); exactly 0, value and gradient, where mask is 0."""
    return (new - old).masked_fill(mask == 0, 0.0).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def importance_weights(
    proximal: Tensor, behaviour: Tensor, mask: Tensor, cap: float | None
) -> Tensor:
    """min(exp(proximal - behaviour), cap), (B, T) float32 without gradient; 0 where mask is 0.

    `proximal` and `behaviour` are (B, T) log-probabilities of the trainer and of the engine. `cap`
    is `algorithm.importance_cap`; null means no correction: weight 1.
    """
    if cap is None:
        return mask.float()
    return log_ratio(proximal.detach(), behaviour.detach(), mask).exp().clamp(max=cap) * mask


def mismatch(
    proximal: Tensor, behaviour: Tensor, mask: Tensor, cap: float | None = None
) -> dict[str, Tensor]:
    """How far the engine is from the trainer, over the response tokens of (B, T) log-probabilities.

    Scalar float32 tensors, sums over tokens (divide by their number, after adding micro-batches and
    ranks): `kl_k3`, an unbiased estimate of KL(behaviour || proximal) in nats that is never
    negative (Schulman 2020, "Approximating KL divergence"), in float64: its terms nearly cancel;
    `abs_diff`, of log-probabilities; `capped`, tokens whose weight the cap cut. Not a sum but a
    maximum (combine with max): `ratio_max`, the largest proximal / behaviour; 0 without tokens.
    """
    logs = log_ratio(proximal.detach(), behaviour.detach(), mask)
    ratio = logs.exp() * mask
    exact = logs.double()
    return {
        "kl_k3": (exact.expm1() - exact).sum().float(),
        "abs_diff": logs.abs().sum(),
        "capped": (ratio > (float("inf") if cap is None else cap)).float().sum(),
        "ratio_max": ratio.max() if ratio.numel() else ratio.sum(),
    }
