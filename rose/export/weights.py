"""Find the sources of a step's weights, and read a few tensors of them at a time.

There are two sources: the run's weight store (the last versions), and its DeepSpeed checkpoints.
Both have the hash that each block of values had in the engines. Left out: the initial weights,
which are in the model's own folder.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol

import torch

from rose.processes import usable_threads
from rose.trainer import adapter, checkpoint
from rose.trainer.experts import parameter_of
from rose.trainer.saved_states import (
    PREFIX,
    WEIGHTS,
    SavedStates,
    mapped,
    model_file,
    optimizer_file,
)
from rose.transfer import versions
from rose.transfer.base import Base
from rose.transfer.blocks import Block, Tensor
from rose.transfer.edge import read_plan
from rose.transfer.errors import Corrupted, Missing, TransferError
from rose.transfer.receive import Receiver, whole
from rose.transfer.source import Folder
from rose.transfer.stage import Live
from rose.transfer.versions import Digests

READ_S = 3600.0  # seconds to read a few GiB, after which a hanging file system is an error
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
STATES = "deepspeed"  # folder of DeepSpeed's files in a checkpoint (trainer/deepspeed_engine.py)


class Weights(Protocol):
    """The weights of a step, as the engines had them."""

    where: str  # description of the source, for messages
    tensors: list[Tensor]  # all tensors in the model's order; tied ones appear once
    base: Base | None  # frozen base weights, if these are an adapter's

    def read(self, tensors: Sequence[Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, Digests]]:
        """Return the values by name, contiguous in host memory, and the digests that they must
        have. Raises a `TransferError` that names the damaged or missing file."""

    def culprit(self, block: Block) -> str:
        """Return the file from which the block's values were read."""


class StoreWeights:
    """The weights in a weight store's folder. Raises `TransferError`."""

    def __init__(self, store: Path, step: int):
        self.store, self.step = Path(store), step
        self.files = self.store  # folder to read; `folder.stores_linked` sets one of hard links
        self.where = f"the weight store {store}"
        plan, _ = read_plan(Folder(store))
        self.tensors, self.base = list(plan.tensors), plan.base

    def read(self, tensors: Sequence[Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, Digests]]:
        values = {t.name: torch.zeros(t.shape, dtype=DTYPES[t.dtype]) for t in tensors}
        live = Live(values)
        plan, _ = read_plan(Folder(self.files))
        receiver = Receiver(str(self.files), None, None, _places_of_live, live)
        try:
            # With room for 0 bytes of decoded blocks, each block is decoded twice: to compare its
            # hash, and to put it in place.
            staged = receiver.stage(None, self.step, usable_threads(), 0, READ_S)
            staged.flip()
        except TransferError as error:
            raise Corrupted(str(error).replace(str(self.files), str(self.store))) from None
        finally:
            receiver.close()
        digests: dict[str, Digests] = {}
        for number, digest in staged.digests.items():
            block = plan.blocks[number]
            digests.setdefault(plan.tensors[block.tensor].name, []).append((block, digest))
        return values, digests

    def culprit(self, block: Block) -> str:
        return f"rank {block.owner}'s files in {self.store}"


def _places_of_live(plan, live: Live):
    """Return block number -> place, for the blocks of the tensors that `live` has."""
    found = whole(plan, live)
    return {number: place for number, place in found.items() if place.parameter in live.matrices}


class CheckpointWeights:
    """The weights in a DeepSpeed checkpoint of any ZeRO stage and number of ranks. Raises
    `TransferError`."""

    def __init__(self, folder: Path):
        self.folder, self.step = Path(folder), checkpoint.step_of(folder)
        self.where = f"the checkpoint {folder}"
        path = self.folder / "trainer.json"
        try:
            state = json.loads(path.read_bytes())
            self.ranks, self.stage = state["ranks"], state["zero_stage"]
            self.dtype, self.scale = DTYPES[state["dtype"]], state.get("scale")
        except (OSError, ValueError, KeyError) as error:
            raise Corrupted(f"{path}: {type(error).__name__}: {error}") from None
        self.tensors, self._digests, self.base = versions.read_hashes(
            self.folder, self.ranks, self.step
        )

    def read(self, tensors: Sequence[Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, Digests]]:
        values = {}
        piece = self._reader_of_shards() if self.stage == 3 else self._reader_of_whole()
        for tensor in tensors:
            parameter, start = parameter_of(adapter.parameter_name(tensor.name), tensor.shape)
            found = piece(PREFIX + parameter, start, tensor.size).view(tensor.shape)
            # Convert to the trainer's dtype and then to the published one, as publishing does.
            held = found.to(self.dtype)
            if adapter.is_scaled(tensor.name):
                held = held.float() * self.scale
            # Copy, because the file is unmapped when this call returns.
            values[tensor.name] = held.to(DTYPES[tensor.dtype]).clone()
        return values, {t.name: self._digests[t.name] for t in tensors}

    def culprit(self, block: Block) -> str:
        if self.stage == 3:
            return str(optimizer_file(self.folder / STATES, block.owner))
        return str(self._model())

    def _reader_of_whole(self) -> Callable[[str, int, int], torch.Tensor]:
        """Return a function of (parameter, start, count) that reads values, for stages below 3:
        every rank had all parameters, and rank 0 saved them."""
        module = mapped(self._model())["module"]

        def piece(name: str, start: int, count: int) -> torch.Tensor:
            if name not in module:
                raise Corrupted(f"{self._model()}: has no {name}")
            return module[name].reshape(-1)[start : start + count]

        return piece

    def _reader_of_shards(self) -> Callable[[str, int, int], torch.Tensor]:
        """Return the same function for stage 3, where each rank saved its part of a parameter."""
        saved = SavedStates(self.folder / STATES, self.ranks, self.stage)

        def piece(name: str, start: int, count: int) -> torch.Tensor:
            value = torch.empty(count)
            saved.read(name, WEIGHTS, start, value)
            return value

        return piece

    def _model(self) -> Path:
        return model_file(self.folder / STATES, 0, self.stage)


def stores(run_dir: Path) -> list[Path]:
    """List the run's weight stores, the newest attempt's first."""
    return sorted((Path(run_dir) / "weights").glob("attempt-*"), reverse=True)


def steps(run_dir: Path, store: Path | None = None) -> dict[str, list[int]]:
    """Return the available steps of each source. The keys describe the sources, for messages."""
    found: dict[str, list[int]] = {}
    for folder in [store] if store else stores(run_dir):
        found[f"the weight store {folder}"] = versions.readable(folder)
    if store is None:
        found[f"the checkpoints in {Path(run_dir) / 'checkpoints'}"] = [
            checkpoint.step_of(folder) for folder in checkpoint.complete(run_dir)
        ]
    return {where: numbers for where, numbers in found.items() if numbers}


def sources(
    run_dir: Path, step: int | None, store: Path | None = None
) -> tuple[int, list[Weights]]:
    """Return (step, all sources of its weights, stores first). `step` None means the newest.
    Raises a `TransferError` that names the available steps, or the damage of all sources."""
    available = steps(run_dir, store)
    if not available:
        raise Missing(
            f"{store or run_dir}: no version of the weights: neither a store in weights/ nor a "
            "checkpoint in checkpoints/; a run has one once it has begun to train"
        )
    step = max(max(numbers) for numbers in available.values()) if step is None else step
    listed = "; ".join(f"{where}: {ranges(numbers)}" for where, numbers in available.items())
    found: list[Weights] = []
    wrong: list[str] = []
    makers: list[Callable[[], Weights]] = [
        partial(StoreWeights, folder, step)
        for folder in ([store] if store else stores(run_dir))
        if step in versions.readable(folder)
    ] + [
        partial(CheckpointWeights, folder)
        for folder in (checkpoint.complete(run_dir) if store is None else [])
        if checkpoint.step_of(folder) == step
    ]
    for make in makers:
        try:
            found.append(make())
        except TransferError as error:
            wrong.append(str(error))
    if not found:
        raise Missing(
            "; ".join(wrong)
            or f"step {step} can't be had; there are: {listed} (a run with eval.keep_best=true "
            "keeps its best)"
        )
    return step, found


def ranges(numbers: Sequence[int]) -> str:
    """Format step numbers: [1, 2, 3, 7] as "1 to 3, 7"."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{r[0]} to {r[-1]}" if len(r) > 1 else str(r[0]) for r in runs)
