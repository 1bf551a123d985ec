"""The LoRA adapter of an engine: one adapter that every turn uses and that new versions overwrite.

vLLM wraps the layers that the adapter targets and keeps its matrices in slots beside them, one pair
for each projection of a fused layer: A as (rank, columns), and B, times alpha / rank, as
(rows, rank). ROSE's engines have one slot. It begins with zeros, which leaves the base model as it
is. Afterwards only rose/engine/weight_transfer.py writes there, in place, so that CUDA graphs and
running requests need no change. All functions but `adapter_request` run in vLLM's worker.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from rose.config.trainer import FUSED

ID = 1


def adapter_request():
    """vLLM's `LoRARequest` that selects the adapter."""
    from vllm.lora.request import LoRARequest

    return LoRARequest("rose", ID, "none: versions are put into the slot")


def begin(model_runner) -> None:
    """Create the adapter, all zeros, and activate it in the slot."""
    manager = model_runner.lora_manager
    manager.add_dummy_lora(adapter_request(), 1)
    manager.set_active_adapters({adapter_request()}, None)
    clear(model_runner.get_model())
    # vLLM drops all adapters after a weight update, since they belonged to the old weights.
    model_runner.reset_lora_state = lambda: None


def base(model: nn.Module) -> dict[str, nn.Parameter]:
    """Map the name that a parameter has in a model without LoRA to the parameter."""
    return {name.replace(".base_layer.", "."): p for name, p in model.named_parameters()}


def slots(model: nn.Module) -> dict[str, torch.Tensor]:
    """Map the name that each matrix has in a version to the slot's memory for it. Shapes are (rank,
    columns) for A and (rows, rank) for B, with the slot's rank. The result is empty in an engine
    without LoRA."""
    found = {}
    for name, layer in _wrapped(model).items():
        parent, _, fused = name.rpartition(".")
        for number, projection in enumerate(p for p, f in FUSED.items() if f == fused):
            at = f"{parent}.{projection}"
            found[f"{at}.lora_A.weight"] = layer.lora_a_stacked[number][0, 0]
            found[f"{at}.lora_B.weight"] = layer.lora_b_stacked[number][0, 0]
    return found


def clear(model: nn.Module) -> None:
    """Fill the adapter with zeros, also after its memory lost its content."""
    for values in slots(model).values():
        values.zero_()
    if hasattr(model, "lora_manager"):
        # Makes vLLM write its adapter indices again: the memory that holds them was lost, too.
        model.lora_manager._last_mapping = None


@contextmanager
def detached(model: nn.Module) -> Iterator[None]:
    """Unwrap the layers within this context, because vLLM's loader knows only the names of
    unwrapped layers. No step may run meanwhile."""
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
