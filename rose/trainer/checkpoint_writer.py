"""Writes a rank's part of a checkpoint while training goes on.

DeepSpeed hands every file of a checkpoint to its checkpoint engine. This one copies the tensors to
host memory at once, so that the next step may change them, and writes the files in a thread
(torch.save lets other threads run while it writes). A file `saved-RANK` in the folder then tells
the coordinator, which looks for it: the rank itself may be in the middle of the next step. Left
out: where host memory has no room for the copy, the files are written before `save` returns.
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

SPARE = 1.25  # times the copy's bytes must be free: engines and page cache go on growing


class CheckpointWriter(CheckpointEngine):
    """DeepSpeed's checkpoint engine of one rank. `neighbours`: ranks on this host, copying too."""

    def __init__(self, rank: int, neighbours: int = 1) -> None:
        super().__init__()
        self.name = "rose"
        self._rank, self._neighbours = rank, neighbours
        self._files: list[tuple[Path, Any]] = []  # copied, to be written
        self._written: list[Path] = []
        self._thread: threading.Thread | None = None
        self._warned = False

    def create(self, info) -> None:
        self._files, self._written = [], []

    def commit(self, info) -> bool:
        return True

    def preserves_storage_sharing(self) -> bool:
        """Copies share nothing, so DeepSpeed need not make its own."""
        return False

    def load(self, path: str, map_location=None) -> Any:
        return loaded(path, deepspeed_objects(), map_location)

    def save(self, state_dict: Any, path: str) -> None:
        """Copy now, write later; or write now where there is no room for the copy."""
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

    def finish(self, folder: Path) -> None:
        """Write what was copied, in a thread, then mark this rank's part as saved, or as failed."""
        files, written = self._files, self._written
        self._files, self._written = [], []
        self._thread = threading.Thread(
            target=self._write, args=(folder, files, written), name="checkpoint", daemon=True
        )
        self._thread.start()

    def wait(self, deadline_s: float) -> bool:
        """Whether nothing is being written any more, after `deadline_s` seconds at most."""
        if self._thread is None:
            return True
        self._thread.join(deadline_s)
        return not self._thread.is_alive()

    def _write(self, folder: Path, files: list[tuple[Path, Any]], written: list[Path]) -> None:
        try:
            while files:
                path, state = files.pop(0)
                torch.save(state, path)
                del state  # its memory is free before the next file is written
                written.append(path)
            for path in written:
                sync(path)
        except Exception as error:  # whatever it was: the coordinator is sent it, and ends the run
            why = f"{type(error).__name__}: {error}"
            refused = refusal(folder)  # of a full disk torch.save does not say so
            checkpoint.mark(folder, self._rank, f"{why}; {refused}" if refused else why)
        else:
            checkpoint.mark(folder, self._rank, "")
        finally:
            heap.release_free()


def host_copy(state: Any) -> Any:
    """The same structure with all tensors copied to host memory; nothing is shared with `state`."""
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
    """Bytes of the tensors in a structure of dictionaries, lists and tuples."""
    if isinstance(state, torch.Tensor):
        return state.numel() * state.element_size()
    if isinstance(state, dict):
        return sum(tensor_bytes(value) for value in state.values())
    if isinstance(state, (list, tuple)):
        return sum(tensor_bytes(value) for value in state)
    return 0


def available_bytes() -> int:
    """Host memory that this process may still take: the machine's, or the least that one of its
    control groups leaves. Slurm limits a job and its steps, which are the groups above that of a
    task."""
    return min([psutil.virtual_memory().available, *(_left(*place) for place in control_groups())])


def _left(group: Path, limit: str, usage: str) -> float:
    """Bytes until the group's limit; what it has of files is given back when it is needed."""
    try:
        most = (group / limit).read_text(encoding="utf-8").strip()
        if most == "max":
            return math.inf
        stat = dict(
            line.split()
            for line in (group / "memory.stat").read_text(encoding="utf-8").splitlines()
        )
        kinds = ("active_file", "inactive_file")
        files = sum(int(stat.get(f"total_{kind}", stat.get(kind, 0))) for kind in kinds)
        return max(0, int(most) - int((group / usage).read_text(encoding="utf-8")) + files)
    except (OSError, ValueError):
        return math.inf  # a group without limits, as the root
