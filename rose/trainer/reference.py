"""The frozen reference model of `algorithm.kl_coef`: the weights of the model's folder, which no
update changes.

The penalty of a token is k3 of Schulman 2020 ("Approximating KL divergence"), as in GRPO (arXiv
2402.03300, equation 4): exp(d) - d - 1 with d = log(reference / policy). It has the weight that the
algorithm gives to the token. On tokens that the policy itself generated, k3 is an unbiased estimate
of KL(policy || reference), and never negative. But the expectation of its gradient is the gradient
of KL(reference || policy). With `algorithm.kl_correction` k3 is multiplied by policy / proximal
(DeepSeek-V3.2, arXiv 2512.02556, section 3.1; TRL's `use_bias_correction_kl`). Proximal is the
policy at the start of the step, or the engine's if the algorithm has `recompute_proximal = False`.
Then the gradient is that of KL(policy || reference). Under ZeRO-3 the reference is split over the
ranks as the policy is. Otherwise each rank holds all of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rose.trainer import adapter
from rose.trainer.importance import log_ratio
from rose.trainer.model import Policy
from rose.trainer.prefix_tree import PrefixTree


class Reference:
    """A reference with weights of its own. `policy` is a second copy of the model, read from the
    same folder. `split` is DeepSpeed's configuration if ZeRO-3 splits this copy, else None."""

    def __init__(self, policy: Policy, device: torch.device, split: dict[str, Any] | None):
        policy.requires_grad_(False)
        policy.eval()
        self.policy, self.device = policy, device
        if split is None:
            self._forward = policy.to(device)
        else:
            import deepspeed  # imported late: it reads DS_ACCELERATOR at import

            self._forward, *_ = deepspeed.initialize(
                model=policy, dist_init_required=False, config=split
            )

    @torch.no_grad()
    def logprobs(
        self, inputs: Tensor, targets: Tensor, mask: Tensor, tree: PrefixTree | None
    ) -> Tensor:
        """Return the targets' log-probabilities, (B, T) float32, 0 where mask is 0."""
        inputs, targets, mask = (x.to(self.device) for x in (inputs, targets, mask))
        return self._forward(inputs, targets, mask, tree and tree.to(self.device))[0]


class BelowAdapter:
    """The reference of a run that trains an adapter: the policy with the adapter switched off.
    `forward` calls the policy through the trainer's engine."""

    def __init__(self, policy: Policy, forward: Callable[..., tuple[Tensor, Tensor]]):
        self._hf, self._forward = policy.hf, forward

    @torch.no_grad()
    def logprobs(
        self, inputs: Tensor, targets: Tensor, mask: Tensor, tree: PrefixTree | None
    ) -> Tensor:
        """Return log-probabilities as `Reference.logprobs` does."""
        with adapter.left_out(self._hf):
            return self._forward(inputs, targets, mask, tree)[0]


def penalty(
    logprobs: Tensor, reference: Tensor, mask: Tensor, proximal: Tensor | None = None
) -> Tensor:
    """Compute k3 for each token, (B, T) in nats, from (B, T) log-probabilities; 0 where mask is 0.
    The gradient flows through `logprobs`. With `proximal`, the log-probabilities of the proximal
    policy, k3 is multiplied by policy / proximal."""
    ratios = log_ratio(reference, logprobs, mask)
    k3 = (ratios.expm1() - ratios) * mask
    return k3 if proximal is None else k3 * log_ratio(logprobs, proximal, mask).exp()
