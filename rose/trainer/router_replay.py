"""Router replay: the trainer sends each token to the experts that the engine sent it to.

Engine and trainer compute a token's router in different kernels, so they may choose different
experts where two are almost equally likely. Then the token's log-probabilities differ by far more
than rounding (R3, arXiv 2510.11370; without it runs of mixtures collapse). With replay the experts
are the engine's, but their weights are the trainer's own probabilities, so the router learns as
always. Tokens without recorded experts, as the last of a turn whose engine was lost, are routed by
the trainer. The recorded experts are those of the first weights that computed the token. An engine
that computes a context again with newer weights may route it otherwise, which is not replayed.
"""

from __future__ import annotations

import functools

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn


class RouterReplay:
    """Replacement for the routers of a Qwen3-MoE. The experts of one `begin` hold until the next,
    so they also hold when the backward pass computes layers again."""

    def __init__(self, hf: nn.Module):
        routers = [layer.mlp.gate for layer in hf.base_model.layers]
        self.layers, self.top_k = len(routers), routers[0].top_k
        self.experts = routers[0].num_experts
        self._chosen: Tensor | None = None  # (N, layers, top k), -1 where unrecorded
        self._counted: Tensor | None = None  # (N,) weight of each choice in `differs`
        self.differs: Tensor | None = None  # () tokens, as `begin` defines it
        for number, router in enumerate(routers):
            router.forward = functools.partial(self._route, router, number)

    def begin(self, chosen: Tensor, mask: Tensor) -> None:
        """Set the experts of the next forward pass: `chosen` (B, T, layers, top k) of any integer
        type, mask (B, T) as in `Policy.forward`. After the pass `differs` () is a sum over the
        mask's tokens: the share of a token's choices that its routers would have made otherwise."""
        self._chosen = chosen.reshape(-1, self.layers, self.top_k)
        self._counted = mask.reshape(-1) / (self.layers * self.top_k)
        self.differs = torch.zeros((), device=mask.device)

    def unpack(self, data: bytes, tokens: int, trajectory: str) -> np.ndarray:
        """Decode the experts (n, layers, top k) of a trajectory's first n tokens. Raises
        `ValueError` if there are none, or if they don't fit this model or `tokens` tokens."""
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
        """Route as Qwen3MoeTopKRouter.forward: logits (N, experts), weights, experts (N, top k)."""
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
