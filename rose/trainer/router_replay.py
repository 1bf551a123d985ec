"""Router replay: the trainer sends each token to the experts that the engine sent it to.

Engine and trainer compute a token's router in different kernels, and where two experts are nearly
equally likely each may take another one: then the token's log-probabilities differ by far more than
rounding (R3, arXiv 2510.11370; without it runs of mixtures collapse). The experts are the engine's,
their weights the trainer's own probabilities, so the router learns as always. A token whose experts
nobody recorded, as the last of a turn whose engine was lost, is routed by the trainer. A token
keeps the experts of the weights that first met it: an engine that computes a context again with
newer weights may route it otherwise for what follows, which is not replayed.
"""

from __future__ import annotations

import functools

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn


class RouterReplay:
    """Takes the place of the routers of a Qwen3-MoE from `begin` to the next `begin`: also while
    layers are computed again in the backward pass."""

    def __init__(self, hf: nn.Module):
        routers = [layer.mlp.gate for layer in hf.base_model.layers]
        self.layers, self.top_k = len(routers), routers[0].top_k
        self.experts = routers[0].num_experts
        self._chosen: Tensor | None = None  # (N, layers, top k), -1 where nobody knows
        self._counted: Tensor | None = None  # (N,)
        self.differs: Tensor | None = None
        for number, router in enumerate(routers):
            router.forward = functools.partial(self._route, router, number)

    def begin(self, chosen: Tensor, mask: Tensor) -> None:
        """Of the next forward pass: `chosen` (B, T, layers, top k) of any integer type, mask (B, T)
        as `Policy.forward` has it. `differs` (): how many of the mask's tokens the routers would
        have sent elsewhere, each as the share of its choices."""
        self._chosen = chosen.reshape(-1, self.layers, self.top_k)
        self._counted = mask.reshape(-1) / (self.layers * self.top_k)
        self.differs = torch.zeros((), device=mask.device)

    def unpack(self, data: bytes, tokens: int, trajectory: str) -> np.ndarray:
        """(n, layers, top k) of a trajectory's first n tokens. Raises `ValueError` where there is
        nothing, or what can't be true of `tokens` tokens of this model."""
        if not data:
            raise ValueError(
                f"trajectory {trajectory}: nobody recorded the experts of its tokens, which "
                "trainer.router_replay=true needs; replayed trajectories have them where "
                "the run that made them had it, too"
            )
        kind = np.dtype("u1" if self.experts <= 256 else "<u2")
        row = self.layers * self.top_k * kind.itemsize
        if len(data) % row or len(data) // row > tokens:
            raise ValueError(
                f"trajectory {trajectory}: {len(data)} bytes of experts for {tokens} tokens; a "
                f"token has {row} ({self.layers} layers x {self.top_k} experts x {kind.itemsize})"
            )
        found = np.frombuffer(data, kind).reshape(-1, self.layers, self.top_k)
        if found.max() >= self.experts:
            raise ValueError(
                f"trajectory {trajectory}: expert {found.max()}; the model has {self.experts}"
            )
        return found

    def _route(self, router: nn.Module, layer: int, hidden: Tensor) -> tuple[Tensor, ...]:
        """As Qwen3MoeTopKRouter.forward: (N, experts) logits, (N, top k) weights and experts."""
        logits = F.linear(hidden.reshape(-1, router.hidden_dim), router.weight)
        likely = logits.softmax(-1, dtype=torch.float)
        own = likely.topk(self.top_k, dim=-1).indices
        asked = self._chosen[:, layer].to(own.dtype)
        chosen = torch.where(asked < 0, own, asked)
        elsewhere = (chosen[:, :, None] != own[:, None]).all(-1)  # (N, top k)
        self.differs += (self._counted[:, None] * elsewhere).sum()
        weights = likely.gather(-1, chosen)
        if router.norm_topk_prob:
            weights = weights / weights.sum(-1, keepdim=True)
        return logits, weights.to(logits.dtype), chosen
