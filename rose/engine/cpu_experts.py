"""vLLM's experts on a CPU, with their weights in the order in which they were read.

vLLM's own kernels reorder each expert's weights when they are loaded, so that an update in place
would change the wrong values. Here each expert computes its tokens by two plain matrix products in
the weights' dtype: slower, and exact in float32. CPU engines serve tests and small models only.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts


def keep_plain() -> None:
    """Make vLLM's CPU experts keep their weights as read, and compute by `_apply`. This holds for
    all models that the process loads afterwards."""
    CPUUnquantizedExperts.process_weights_after_loading = lambda self, layer: None
    CPUUnquantizedExperts.apply = _apply


def _apply(
    self: CPUUnquantizedExperts,
    output: torch.Tensor,  # (tokens, hidden)
    hidden_states: torch.Tensor,  # (tokens, hidden)
    w1: torch.Tensor,  # (experts, 2 x width, hidden): gate above up
    w2: torch.Tensor,  # (experts, hidden, width)
    topk_weights: torch.Tensor,  # (tokens, top k)
    topk_ids: torch.Tensor,  # (tokens, top k)
    activation: MoEActivation,
    global_num_experts: int,
    expert_map: torch.Tensor | None,  # (experts of all ranks,): number on this rank or -1
    *_,
    **__,
) -> None:
    """Write each token's weighted sum over its experts into `output`."""
    if activation != MoEActivation.SILU:
        raise NotImplementedError(f"experts with {activation} on a CPU; ROSE has SILU")
    local = topk_ids if expert_map is None else expert_map[topk_ids.long()]
    output.zero_()
    for expert in local.unique().tolist():
        if expert < 0:
            continue
        tokens, place = (local == expert).nonzero(as_tuple=True)
        gate, up = F.linear(hidden_states[tokens], w1[expert]).chunk(2, -1)
        result = F.linear(F.silu(gate) * up, w2[expert])
        output.index_add_(0, tokens, (result * topk_weights[tokens, place, None]).to(output.dtype))
