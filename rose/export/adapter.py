"""The folder of a LoRA run: its adapter as PEFT has them, or the model with the adapter in it.

An adapter's B is written as engines had it, times alpha / rank; `lora_alpha` is therefore the rank,
whose scale is 1. Merged matrices are W + B A, computed in float32 and rounded to the dtype once.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from rose.config import Config
from rose.export.weights import DTYPES, Weights
from rose.trainer.shards import patterns_of
from rose.transfer import versions
from rose.transfer.base import digest_of
from rose.transfer.blocks import Block, Tensor
from rose.transfer.errors import Corrupted, Missing, TransferError
from rose.transfer.versions import Digests

PREFIX = "base_model.model."  # PEFT's, of the names in its files
FILE = "adapter_model.safetensors"
WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"


class OtherBase(TransferError):
    """The base model's folder is another's: no place of the adapter helps."""


def write_config(config: Config, folder: Path) -> None:
    """adapter_config.json."""
    from peft import LoraConfig  # takes seconds

    lora = config.trainer.lora
    LoraConfig(
        base_model_name_or_path=str(config.model.path),
        revision=config.model.revision,
        task_type="CAUSAL_LM",
        r=lora.rank,
        lora_alpha=lora.rank,
        target_modules=lora.targets,
        inference_mode=True,
    ).save_pretrained(folder)


class Merged:
    """`adapter` in the base model of the folder `source`, as `rose.export.weights.Weights`."""

    def __init__(self, adapter: Weights, source: Path):
        self.adapter, self.source, self.base = adapter, source, None
        self.where = f"{adapter.where}, merged into {source}"
        self.tensors = adapter.base.tensors
        self._below = adapter.base.digests()
        self._files = _files(source)

    def read(self, tensors: Sequence[Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, Digests]]:
        """The merged values, and their own digests. Raises `TransferError` unless the base and the
        adapter are those of the run."""
        values: dict[str, torch.Tensor] = {}
        digests: dict[str, Digests] = {}
        for tensor in tensors:
            value = self._frozen(tensor)
            at = tensor.name.removesuffix("weight")
            a, b = (self._parts.get(f"{at}lora_{kind}.weight") for kind in "AB")
            if a is not None:
                value = (value.float() + b.float() @ a.float()).to(value.dtype)
            values[tensor.name] = value.contiguous()
            patterns = patterns_of(value.reshape(-1))
            digests[tensor.name] = [
                (block, digest_of(patterns, block, tensor.columns))
                for block, _ in self._below[tensor.name]
            ]
        return values, digests

    def culprit(self, block: Block) -> str:
        return "the file that was written"

    def _frozen(self, tensor: Tensor) -> torch.Tensor:
        path = self.source / self._files.get(tensor.name, WHOLE)
        try:
            with safe_open(path, "pt") as file:
                value = file.get_tensor(tensor.name).to(DTYPES[tensor.dtype])
        except (OSError, SafetensorError) as error:
            raise Missing(f"{path}: {tensor.name}: {error}") from None
        patterns = patterns_of(value.reshape(-1))
        if versions.differing(patterns, tensor, self._below[tensor.name]) is not None:
            raise OtherBase(
                f"{path}: {tensor.name} is not what the adapter was trained beside: it is for "
                "another base model; give the run's own with --base"
            )
        return value

    @cached_property
    def _parts(self) -> dict[str, torch.Tensor]:
        """The whole adapter, which is small, read and compared once."""
        values, digests = self.adapter.read(self.adapter.tensors)
        for part in self.adapter.tensors:
            found = patterns_of(values[part.name].reshape(-1))
            if (bad := versions.differing(found, part, digests[part.name])) is not None:
                raise Corrupted(
                    f"{self.adapter.culprit(bad)}: {part.name} is not what the engines had: its "
                    "xxh3-128 differs; the file is damaged"
                )
        return values


def _files(source: Path) -> dict[str, str]:
    """Tensor -> file of a model's folder that has several."""
    path = source / INDEX
    return json.loads(path.read_text(encoding="utf-8"))["weight_map"] if path.is_file() else {}
