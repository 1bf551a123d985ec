"""Mixtures of experts in transformers: how they are computed, and read under ZeRO-3.

Computing: on Blackwell GPUs torch's grouped product gives an expert without tokens a wrong weight
gradient, which should be zero (pytorch#172439; CUTLASS writes out an accumulator that was never
set, cutlass#2674). Padding micro-batches have one token, so most experts have none. Here every
expert also gets a row of zeros with weight zero. This is right on every GPU and costs experts / top
k tokens. transformers' "eager" would write a gradient of all experts for each chosen expert.

Reading: folders have a matrix for each expert and projection. transformers merges them on every
rank, though only rank 0's result is used. Here only rank 0 merges them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.integrations import deepspeed as hf_deepspeed
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, grouped_mm_experts_forward

NAME = "rose_grouped"  # our name in transformers' registry of experts' functions


def experts(module: nn.Module, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """Compute a layer's experts, with transformers' signature: hidden (N, H), the experts chosen
    (N, top k) and their weights -> (N, H)."""
    top_k = chosen.shape[-1]
    more = -(-module.num_experts // top_k)
    each = torch.arange(more * top_k, dtype=chosen.dtype, device=chosen.device)
    out = grouped_mm_experts_forward(
        module,
        F.pad(hidden, (0, 0, 0, more)),
        torch.cat([chosen, (each % module.num_experts).view(more, top_k)]),
        F.pad(weights, (0, 0, 0, more)),
    )
    return out[: len(hidden)]


ALL_EXPERTS_FUNCTIONS.register(NAME, experts)


@contextmanager
def merged_by_first_rank() -> Iterator[None]:
    """Make `from_pretrained` under ZeRO-3 merge on rank 0 alone within this context. That rank
    holds all experts of the model in host memory at once."""
    convert = hf_deepspeed._apply_weight_conversions_to_state_dict
    if torch.distributed.get_rank() != 0:
        shapes = functools.partial(_shapes, convert)
        hf_deepspeed._apply_weight_conversions_to_state_dict = shapes
    try:
        yield
    finally:
        hf_deepspeed._apply_weight_conversions_to_state_dict = convert


def _shapes(
    convert: Callable[..., dict[str, Tensor]], model: nn.Module, stored: dict[str, Tensor], how: Any
) -> dict[str, Tensor]:
    """Run `convert` on the folder's tensors, but give the tensors that it creates no values.
    Tensors that it passes on keep their values, since every rank reads the model's buffers."""
    empty = {name: tensor.to("meta") for name, tensor in stored.items()}
    values = {id(tensor): stored[name] for name, tensor in empty.items()}
    found = convert(model, dict(empty), how)  # a copy, since `convert` empties its argument
    return {name: values.get(id(tensor), tensor) for name, tensor in found.items()}
