"""Router replay: the trainer sends each token to the experts to which the engine sent it.

Engine and trainer compute a token's routing by different kernels, so they may choose different
experts if two are almost equally likely. Then the token's log-probabilities differ by far more than
rounding, and runs of mixtures can collapse (R3, arXiv 2510.11370). With replay the experts are the
engine's, but their weights are the trainer's own probabilities, so the router still learns. The
trainer itself routes tokens without recorded experts, such as the last token of a turn whose engine
was lost. The recorded experts are those of the weights that first computed the token. If an engine
computes a context again with newer weights, it may choose other experts, which are not replayed.
"""

from __future__ import annotations

import functools

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn


class RouterReplay:
    """Replacement for the routers of a Qwen3-MoE. The experts of one `begin` apply until the next,
    also while the backward pass computes layers again."""

    def __init__(self, hf: nn.Module):
        routers = [layer.mlp.gate for layer in hf.base_model.layers]
        self.layers, self.top_k = len(routers), routers[0].top_k
        self.experts = routers[0].num_experts
        self._chosen: Tensor | None = None  # (N, layers, top k), -1 where unrecorded
        self._counted: Tensor | None = None  # (N,) weight of each choice in `differs`
        self.differs: Tensor | None = None  # (), see `begin`
        for number, router in enumerate(routers):
            router.forward = functools.partial(self._route, router, number)

    def begin(self, chosen: Tensor, mask: Tensor) -> None:
        """Set the experts of the next forward pass: `chosen` (B, T, layers, top k) of any integer
        type, mask (B, T) as in `Policy.forward`. The pass sums `differs`, (), over the mask's
        tokens: the share of a token's experts that the trainer's routers would not choose."""
        self._chosen = chosen.reshape(-1, self.layers, self.top_k)
        self._counted = mask.reshape(-1) / (self.layers * self.top_k)
        self.differs = torch.zeros((), device=mask.device)

    def unpack(self, data: bytes, tokens: int, trajectory: str) -> np.ndarray:
        """Decode the experts (n, layers, top k) of a trajectory's first n tokens. Raises
        `ValueError` if `data` is empty, or doesn't fit this model or the number of `tokens`."""
        if not data:
            raise ValueError(
                f"trajectory {trajectory}: the experts of its tokens were not recorded, which "
                "trainer.router_replay=true needs; replayed trajectories must come from a run with "
                "trainer.router_replay=true"
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
        recorded = self._chosen[:, layer].to(own.dtype)
        chosen = torch.where(recorded < 0, own, recorded)
        elsewhere = (chosen[:, :, None] != own[:, None]).all(-1)  # (N, top k)
        self.differs += (self._counted[:, None] * elsewhere).sum()
        weights = likely.gather(-1, chosen)
        if router.norm_topk_prob:
            weights = weights / weights.sum(-1, keepdim=True)
        return logits, weights.to(logits.dtype), chosen
