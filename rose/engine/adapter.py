"""The LoRA adapter of an engine: one adapter that every turn uses and that new versions overwrite.

vLLM wraps the layers that the adapter targets. It keeps the adapter's matrices in slots beside
them, one pair for each projection of a fused layer: A as (rank, columns), and B, times alpha /
rank, as (rows, rank). ROSE's engines have one slot. It begins with zeros, which leaves the base
model as it is. Afterwards only rose/engine/weight_transfer.py writes there, in place, so that CUDA
graphs and running requests need no change. All functions but `adapter_request` run in a worker.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from rose.config.trainer import FUSED

ID = 1  # vLLM's number of the adapter


def adapter_request():
    """Return vLLM's `LoRARequest` that selects the adapter."""
    from vllm.lora.request import LoRARequest

    return LoRARequest("rose", ID, "none: versions are put into the slot")


def begin(model_runner) -> None:
    """Create the adapter, filled with zeros, and activate it in the slot."""
    manager = model_runner.lora_manager
    manager.add_dummy_lora(adapter_request(), 1)
    manager.set_active_adapters({adapter_request()}, None)
    clear(model_runner.get_model())
    # vLLM drops all adapters after a weight update, since they belonged to the old weights.
    model_runner.reset_lora_state = lambda: None


def base(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the model's parameters by the names that they have in a model without LoRA."""
    return {name.replace(".base_layer.", "."): p for name, p in model.named_parameters()}


def slots(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the slot's memory for each matrix, by the matrix's name in a version. Shapes are
    (rank, columns) for A and (rows, rank) for B, with the slot's rank. Empty without LoRA."""
    found = {}
    for name, layer in _wrapped_layers(model).items():
        parent, _, fused = name.rpartition(".")
        for number, projection in enumerate(p for p, f in FUSED.items() if f == fused):
            at = f"{parent}.{projection}"
            found[f"{at}.lora_A.weight"] = layer.lora_a_stacked[number][0, 0]
            found[f"{at}.lora_B.weight"] = layer.lora_b_stacked[number][0, 0]
    return found


def clear(model: nn.Module) -> None:
    """Fill the adapter with zeros. Also needed after the adapter's memory has lost its content."""
    for values in slots(model).values():
        values.zero_()
    if hasattr(model, "lora_manager"):
        # vLLM must write its adapter indices again, because their memory may be lost, too.
        model.lora_manager._last_mapping = None


@contextmanager
def detached(model: nn.Module) -> Iterator[None]:
    """Unwrap the layers within this context, because vLLM's loader knows only the names of
    unwrapped layers. No engine step may run meanwhile."""
    wrapped = _wrapped_layers(model)
    for name, layer in wrapped.items():
        _replace_layer(model, name, layer.base_layer)
    try:
        yield
    finally:
        for name, layer in wrapped.items():
            _replace_layer(model, name, layer)


def _wrapped_layers(model: nn.Module) -> dict[str, nn.Module]:
    return model.lora_manager.modules if hasattr(model, "lora_manager") else {}


def _replace_layer(model: nn.Module, name: str, layer: nn.Module) -> None:
    parent, _, own = name.rpartition(".")
    setattr(model.get_submodule(parent), own, layer)
