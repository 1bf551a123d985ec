"""The adapter that is trained instead of the model's own weights: PEFT's LoRA layers.

A policy version has the adapter's matrices as vLLM keeps them, with B already multiplied by
alpha / rank. A and B are named after the model's matrix that they change, as `lora_A`, `lora_B`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import nn

from rose.config import Lora
from rose.config.trainer import FUSED
from rose.trainer.shards import patterns_of
from rose.transfer.base import Base, measure
from rose.transfer.blocks import Tensor

NAME = "default"  # PEFT's name of a model's only adapter


def attach(hf: nn.Module, lora: Lora, dtype: torch.dtype) -> None:
    """Freeze the model and add new LoRA layers to the modules of `lora.targets`. A is random
    (torch's generator) and B is zero, so the output doesn't change yet. Raises `ValueError` for a
    target that the model doesn't have."""
    from peft import LoraConfig, inject_adapter_in_model  # an import of seconds

    modules = {name.rpartition(".")[2] for name, _ in hf.named_modules()}
    if absent := sorted(set(lora.targets) - modules):
        raise ValueError(
            f"trainer.lora.targets={lora.targets}: the model has no module {absent[0]}; there are "
            f"{', '.join(sorted(modules & set(FUSED)))}"
        )
    hf.requires_grad_(False)
    inject_adapter_in_model(
        LoraConfig(r=lora.rank, lora_alpha=lora.alpha, target_modules=lora.targets), hf
    )
    for parameter in hf.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)


def stored_name(name: str) -> str:
    """Return a parameter's name in version stores and the model's folder, without PEFT's layers."""
    return name.replace(".base_layer.", ".").replace(f".{NAME}.weight", ".weight")


def parameter_name(stored: str) -> str:
    """Inverse of `stored_name` for the adapter's parameters; returns any other name unchanged."""
    for kind in "AB":
        stored = stored.replace(f".lora_{kind}.weight", f".lora_{kind}.{NAME}.weight")
    return stored


def is_scaled(stored: str) -> bool:
    """True for the tensors that a version has multiplied by alpha / rank: every B."""
    return stored.endswith(".lora_B.weight")


def scales(lora: Lora, weights: list[tuple[str, nn.Parameter]]) -> dict[str, float]:
    """Map each B's stored name to alpha / rank, a version's factor on the parameter's values."""
    return {name: lora.scale for name, _ in weights if is_scaled(name)}


def base_of(
    weights: list[tuple[str, nn.Parameter]],
    whole: Callable[[nn.Parameter], torch.Tensor],
    dtype: torch.dtype,
    cuts: Callable[[str, tuple[int, ...]], tuple[list[int], list[int]]],
) -> Base:
    """Hash the frozen weights that the adapter is trained on, in the engines' `dtype`. All ranks
    call this together: `whole(parameter)` gathers a parameter that is split over ranks. `cuts` is
    that of `Trainer.open_store`."""
    name = str(dtype).removeprefix("torch.")

    def read(parameter: nn.Parameter) -> Callable[[], np.ndarray]:
        return lambda: patterns_of(whole(parameter).to(dtype).reshape(-1))

    shapes = [tuple(getattr(p, "ds_shape", p.shape)) for _, p in weights]
    tensors = [Tensor(n, shape, name) for (n, _), shape in zip(weights, shapes, strict=True)]
    reads = [read(p) for _, p in weights]
    return measure(zip(tensors, reads, strict=True), cuts)


def keep_own(module: nn.Module, state: dict, prefix: str, metadata: dict) -> None:
    """Hook of `state_dict`: drop everything but the adapter, for checkpoints. DeepSpeed drops
    frozen parameters, but not the second name of a matrix that embeddings and head share."""
    for name in [name for name in state if ".lora_" not in name]:
        del state[name]


@contextmanager
def left_out(hf: nn.Module) -> Iterator[None]:
    """Switch the adapter off within this context, by a scale of 0. PEFT's own switch would set
    requires_grad=False on the adapter's parameters, which the optimizer then no longer sees."""
    layers = [layer for layer in hf.modules() if hasattr(layer, "lora_A")]
    before = [layer.scaling[NAME] for layer in layers]
    for layer in layers:
        layer.scaling[NAME] = 0.0
    try:
        yield
    finally:
        for layer, scale in zip(layers, before, strict=True):
            layer.scaling[NAME] = scale
