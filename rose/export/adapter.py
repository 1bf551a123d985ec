"""The folder of a LoRA run: its adapter in PEFT's format, or the model with the adapter merged.

The engines had an adapter's B multiplied by alpha / rank, and B is written so. Therefore the file
has the rank as its `lora_alpha`, which means a scale of 1. Merged matrices are W + B A, computed in
float32 and rounded to the dtype once.
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
from rose.weight_files import INDEX, WHOLE

PREFIX = "base_model.model."  # PEFT's prefix of tensors' names in its files
FILE = "adapter_model.safetensors"  # PEFT's name


class OtherBase(TransferError):
    """The folder has another base model than the adapter's. Another source of the adapter would not
    help."""


def write_config(config: Config, folder: Path, base: Path) -> None:
    """Write adapter_config.json. `base`: the base model's folder, which the file names if a recipe
    made the model."""
    from peft import LoraConfig  # takes seconds to import

    lora = config.trainer.lora
    LoraConfig(
        base_model_name_or_path=str(config.model.path or base),
        revision=config.model.revision,
        task_type="CAUSAL_LM",
        r=lora.rank,
        lora_alpha=lora.rank,
        target_modules=lora.targets,
        inference_mode=True,
    ).save_pretrained(folder)


class Merged:
    """The base model in the folder `source` with `adapter` merged into it, as `Weights`."""

    def __init__(self, adapter: Weights, source: Path):
        self.adapter, self.source, self.base = adapter, source, None
        self.where = f"{adapter.where}, merged into {source}"
        self.tensors = adapter.base.tensors
        self._base_digests = adapter.base.digests()
        self._files = _files(source)

    def read(self, tensors: Sequence[Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, Digests]]:
        """Return the merged values, and digests computed from them, since the engines had no merged
        values. Raises `TransferError` unless base and adapter are those of the run."""
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
                for block, _ in self._base_digests[tensor.name]
            ]
        return values, digests

    def culprit(self, block: Block) -> str:
        return "the file that was written"

    def _frozen(self, tensor: Tensor) -> torch.Tensor:
        """Return the base model's values. Raises `OtherBase` if they are not the run's."""
        path = self.source / self._files.get(tensor.name, WHOLE)
        try:
            with safe_open(path, "pt") as file:
                value = file.get_tensor(tensor.name).to(DTYPES[tensor.dtype])
        except (OSError, SafetensorError) as error:
            raise Missing(f"{path}: {tensor.name}: {error}") from None
        patterns = patterns_of(value.reshape(-1))
        if versions.differing(patterns, tensor, self._base_digests[tensor.name]) is not None:
            raise OtherBase(
                f"{path}: {tensor.name} is not what the adapter was trained beside: it is for "
                "another base model; give the run's own with --base"
            )
        return value

    @cached_property
    def _parts(self) -> dict[str, torch.Tensor]:
        """Values of the whole adapter, which is small. Read and checked once."""
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
    """Return tensor -> file if the model's folder has several files of weights; {} otherwise.
    Raises `Missing` for a damaged index."""
    path = source / INDEX
    if not path.is_file():
        return {}
    try:
        return dict(json.loads(path.read_text(encoding="utf-8"))["weight_map"])
    except (ValueError, KeyError, TypeError) as error:
        raise Missing(
            f"{path}: no index of weights ({error!r}); give the base model's folder undamaged, as "
            "with --base"
        ) from None
