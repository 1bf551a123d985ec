"""A thread that writes a rank's part of a checkpoint while training goes on.

DeepSpeed passes every file of a checkpoint to its checkpoint engine. This engine copies the tensors
to host memory at once, so that the next step may change them. A thread then writes the files
(torch.save lets other threads run), and last a file `saved-RANK`. The coordinator polls for that
file, since the rank itself may be in the middle of the next step. If host memory has no room for
the copy, the files are written before `save` returns.
"""

from __future__ import annotations

import copy
import math
import sys
import threading
from collections import OrderedDict
from pathlib import Path
from typing import Any

import psutil
import torch
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine

from rose import heap
from rose.files import refusal
from rose.memory import control_groups
from rose.trainer import checkpoint
from rose.trainer.saved_states import deepspeed_objects, loaded
from rose.transfer.store import sync

# Free host memory that a copy needs, as a multiple of its bytes: engines and page cache still grow.
SPARE = 1.25


class CheckpointWriter(CheckpointEngine):
    """DeepSpeed's checkpoint engine of one rank. `neighbours` ranks of this host copy together."""

    def __init__(self, rank: int, neighbours: int = 1) -> None:
        super().__init__()
        self.name = "rose"
        self._rank, self._neighbours = rank, neighbours
        self._files: list[tuple[Path, Any]] = []  # copied files that are not written yet
        self._written: list[Path] = []
        self._thread: threading.Thread | None = None
        self._warned = False

    def create(self, info) -> None:
        self._files, self._written = [], []

    def commit(self, info) -> bool:
        return True

    def preserves_storage_sharing(self) -> bool:
        """Return False: the copies share no memory, so DeepSpeed need not make its own."""
        return False

    def load(self, path: str, map_location=None) -> Any:
        return loaded(path, deepspeed_objects(), map_location)

    def save(self, state_dict: Any, path: str) -> None:
        """Copy now and write in `finish`. If host memory has no room for a copy, write now."""
        needed = SPARE * tensor_bytes(state_dict) * self._neighbours
        if needed < available_bytes():
            self._files.append((Path(path), host_copy(state_dict)))
            return
        if not self._warned:
            self._warned = True
            print(
                f"checkpoints are written while training waits: a copy takes {needed / 2**30:.1f} "
                f"GiB of host memory and {available_bytes() / 2**30:.1f} are free",
                file=sys.stderr,
                flush=True,
            )
        torch.save(state_dict, path)
        self._written.append(Path(path))

    def finish(self, folder: Path, error: str = "") -> None:
        """Start a thread that writes the copied files and marks this rank's part as saved or
        failed. With an `error`, of a file that the rank itself wrote, only mark it as failed."""
        files, written = self._files, self._written
        self._files, self._written = [], []
        if error:
            checkpoint.mark(folder, self._rank, error)
            return
        self._thread = threading.Thread(
            target=self._write, args=(folder, files, written), name="checkpoint", daemon=True
        )
        self._thread.start()

    def wait(self, deadline_s: float) -> bool:
        """Wait up to `deadline_s` seconds. Returns True if nothing is being written any more."""
        if self._thread is None:
            return True
        self._thread.join(deadline_s)
        return not self._thread.is_alive()

    def _write(self, folder: Path, files: list[tuple[Path, Any]], written: list[Path]) -> None:
        """Write and sync the files, and mark this rank's part. Runs in the thread."""
        try:
            while files:
                path, state = files.pop(0)
                torch.save(state, path)
                del state  # frees its memory before the next file is written
                written.append(path)
            for path in written:
                sync(path)
        except Exception as error:  # any error: the coordinator reports it and ends the run
            why = f"{type(error).__name__}: {error}"
            refused = refusal(folder)  # the file system's own reason: torch.save hides a full disk
            checkpoint.mark(folder, self._rank, f"{why}; {refused}" if refused else why)
        else:
            checkpoint.mark(folder, self._rank, "")
        finally:
            heap.release_free()


def host_copy(state: Any) -> Any:
    """Copy a structure and its tensors to host memory. The copy shares nothing with `state`."""
    if isinstance(state, torch.nn.Parameter):
        return torch.nn.Parameter(state.detach().to("cpu", copy=True), state.requires_grad)
    if isinstance(state, torch.Tensor):
        return state.detach().to("cpu", copy=True)
    if type(state) in (dict, OrderedDict):
        return type(state)((key, host_copy(value)) for key, value in state.items())
    if type(state) in (list, tuple):
        return type(state)(host_copy(value) for value in state)
    return copy.deepcopy(state)


def tensor_bytes(state: Any) -> int:
    """Sum the bytes of the tensors in a structure of dictionaries, lists and tuples."""
    if isinstance(state, torch.Tensor):
        return state.numel() * state.element_size()
    if isinstance(state, dict):
        return sum(tensor_bytes(value) for value in state.values())
    if isinstance(state, (list, tuple)):
        return sum(tensor_bytes(value) for value in state)
    return 0


def available_bytes() -> int:
    """Bytes of host memory that this process may still allocate: the minimum over the machine and
    all control groups around the process. Slurm limits the groups of the job and of the job step,
    which contain the task's group."""
    return min([psutil.virtual_memory().available, *(_left(*place) for place in control_groups())])


def _left(group: Path, limit: str, usage: str) -> float:
    """Bytes until the group's limit. Cached files count as free: the kernel drops them."""
    try:
        most = int((group / limit).read_text(encoding="utf-8"))
        stat = dict(
            line.split()
            for line in (group / "memory.stat").read_text(encoding="utf-8").splitlines()
        )
        kinds = ("active_file", "inactive_file")
        files = sum(int(stat.get(f"total_{kind}", stat.get(kind, 0))) for kind in kinds)
        return max(0, most - int((group / usage).read_text(encoding="utf-8")) + files)
    except (OSError, ValueError):
        return math.inf  # no limit: the text "max", or no such file, as in the root group
