"""The adapter of an engine: vLLM's LoRA, with one adapter that every turn uses and whose memory
versions are put into.

vLLM wraps the layers that have targets and keeps an adapter's matrices in slots beside them, each
projection of a fused layer apart, A as (rank, columns) and B, times alpha / rank, as (rows, rank).
There is one slot. It begins with zeros, which is the base model; afterwards only
rose/engine/weight_transfer.py writes there, in place, so that graphs and requests never notice.
Called in vLLM's worker, but for `adapter_request`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from rose.config.trainer import FUSED

ID = 1


def adapter_request():
    """vLLM's `LoRARequest` of the adapter."""
    from vllm.lora.request import LoRARequest

    return LoRARequest("rose", ID, "none: versions are put into the slot")


def begin(model_runner) -> None:
    """Make the adapter and give it the slot."""
    manager = model_runner.lora_manager
    manager.add_dummy_lora(adapter_request(), 1)
    manager.set_active_adapters({adapter_request()}, None)
    clear(model_runner.get_model())
    # vLLM forgets all adapters after an update of the weights, as theirs were for the old ones.
    model_runner.reset_lora_state = lambda: None


def base(model: nn.Module) -> dict[str, nn.Parameter]:
    """Every parameter, by its name in a model without LoRA."""
    return {name.replace(".base_layer.", "."): p for name, p in model.named_parameters()}


def slots(model: nn.Module) -> dict[str, torch.Tensor]:
    """A version's name of each matrix -> the slot's memory for it, (rank, columns) or
    (rows, rank) of the slot's rank; {} in an engine without LoRA."""
    found = {}
    for name, layer in _wrapped(model).items():
        parent, _, fused = name.rpartition(".")
        for number, projection in enumerate(p for p, f in FUSED.items() if f == fused):
            at = f"{parent}.{projection}"
            found[f"{at}.lora_A.weight"] = layer.lora_a_stacked[number][0, 0]
            found[f"{at}.lora_B.weight"] = layer.lora_b_stacked[number][0, 0]
    return found


def clear(model: nn.Module) -> None:
    """The adapter is of zeros again, also where the memory's content was lost."""
    for values in slots(model).values():
        values.zero_()
    if hasattr(model, "lora_manager"):
        model.lora_manager._last_mapping = None  # else what was lost of it is taken for there


@contextmanager
def detached(model: nn.Module) -> Iterator[None]:
    """The layers as they were before vLLM wrapped them, as its loader knows only their names.
    Nothing may run meanwhile."""
    wrapped = _wrapped(model)
    for name, layer in wrapped.items():
        _put(model, name, layer.base_layer)
    try:
        yield
    finally:
        for name, layer in wrapped.items():
            _put(model, name, layer)


def _wrapped(model: nn.Module) -> dict[str, nn.Module]:
    return model.lora_manager.modules if hasattr(model, "lora_manager") else {}


def _put(model: nn.Module, name: str, layer: nn.Module) -> None:
    parent, _, own = name.rpartition(".")
    setattr(model.get_submodule(parent), own, layer)
