"""A mixin of `DeepSpeedEngine` that saves and loads a trainer rank's part of a checkpoint."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rose.files import write_whole
from rose.trainer import checkpoint
from rose.trainer.saved_states import SavedStates, loaded
from rose.trainer.shards import ShardReader

SAVE_BEFORE_S = 1800.0  # longest wait until the previous checkpoint is on disk
TAG = "deepspeed"  # folder of DeepSpeed's files within a checkpoint


class Saving:
    """The mixin's methods. `self.writer` is the `CheckpointWriter`, which writes in a thread."""

    def save(self, folder: Path) -> None:
        """Copy model, optimizer, update count and random states, and write them into `folder` in a
        thread. Training may go on at once. The folder is complete when `checkpoint.saved` counts
        every rank.

        First waits for the previous checkpoint, and raises what `saved` raises."""
        self.saved()
        self.engine.save_checkpoint(
            str(folder),
            tag=TAG,
            save_latest=False,
            exclude_frozen_parameters=self.settings.lora is not None,
        )
        self.writer.save(_random_states(self.device), str(folder / f"random-{self.rank}.pt"))
        error = ""
        if self.rank == 0:
            state = {
                "updates": self.updates,
                "ranks": self.world,
                "zero_stage": self.settings.zero_stage,
                "dtype": self.settings.dtype,
            }
            if self.settings.lora is not None:
                state |= {"base": self.base, "scale": self.settings.lora.scale}
            note = (json.dumps(state) + "\n").encode()
            try:
                write_whole(folder / checkpoint.TRAINER_STATE, note, sync=True)
            except OSError as refused:  # such as a full disk, reported like the thread's errors
                error = f"{type(refused).__name__}: {refused}"
        torch.distributed.barrier()
        self.writer.finish(folder, error)

    def saved(self) -> None:
        """Wait while a checkpoint is being written. Raises `TimeoutError` after `SAVE_BEFORE_S`."""
        if not self.writer.wait(SAVE_BEFORE_S):
            raise TimeoutError(
                f"trainer rank {self.rank} is writing its part of the last checkpoint for over "
                f"{SAVE_BEFORE_S:g} s"
            )

    def load(self, folder: Path) -> None:
        """Load what `save` wrote. Under ZeRO the number of ranks and the stage (1 to 3) may differ
        from those of the run that saved. Raises `ValueError` if the checkpoint is absent or does
        not fit this configuration, and `TransferError` for a damaged file."""
        state = checkpoint.read_trainer(folder, self.settings)
        if state.get("base", "") != self.base:
            raise ValueError(
                f"{folder / checkpoint.TRAINER_STATE}: the adapter is for another base model, of "
                f"the hash {state.get('base', '')!r}; that of model.path is {self.base!r}: bring "
                "its files back, or begin a run of another name"
            )
        ranks, stage = state["ranks"], state["zero_stage"]
        if stage and (ranks, stage) != (self.world, self.settings.zero_stage):
            self._load_other(folder / TAG, ranks, stage)
        else:
            path, _ = self.engine.load_checkpoint(
                str(folder), tag=TAG, load_module_strict=self.settings.lora is None
            )
            if path is None:
                raise ValueError(f"{folder / TAG}: DeepSpeed found no checkpoint there")
        self.updates = state["updates"]
        # A rank without saved states takes another rank's: all ranks of a run begin with the same.
        states = loaded(folder / f"random-{self.rank % ranks}.pt")
        _restore_random_states(states, self.device)

    def _load_other(self, files: Path, ranks: int, stage: int) -> None:
        """Load states that were saved by another number of ranks or at another stage."""
        zero, own = self.engine.optimizer, self.settings.zero_stage
        if self.rank == 0:
            print(f"{files}: {checkpoint.change((ranks, stage), (self.world, own))}", flush=True)
        if own == 3:
            zero.checkpoint_event_prologue()
        weights = self.policy.named_weights()
        shards = ShardReader(self.engine, weights, own, torch.float32, self.rank, self.world)
        SavedStates(files, ranks, stage).restore(zero, shards, self.rank)
        if own == 3:
            zero.checkpoint_event_epilogue()
        else:
            zero.update_lp_params()


def _random_states(device: torch.device) -> dict[str, Any]:
    version, words, gauss = random.getstate()
    name, keys, *rest = np.random.get_state()
    states = {
        "torch": torch.get_rng_state(),
        "python": [version, list(words), gauss],
        "numpy": [name, torch.from_numpy(keys.astype(np.int64)), *rest],
    }
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def _restore_random_states(states: dict[str, Any], device: torch.device) -> None:
    version, words, gauss = states["python"]
    random.setstate((version, tuple(words), gauss))
    name, keys, *rest = states["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(states["torch"])
    if device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"], device)
