"""Checkpoints of a run: a folder per step, complete or absent.

``checkpoints/step-000010.tmp/`` is filled by the trainer ranks, each of which marks its part when
all of it is on disk; the coordinator adds its own state and renames the folder to ``step-000010/``:
one without ``.tmp`` is whole, whenever the job was killed.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rose import config as configuration
from rose.files import write_whole
from rose.transfer.store import sync

COORDINATOR_STATE, TRAINER_STATE = "coordinator.json", "trainer.json"
SAVED, FAILED = "saved", "failed"  # marks of the trainer ranks
MARK = re.compile(rf"({SAVED}|{FAILED})-(\d+)")  # and no name under which one is being written


@dataclass
class Save:
    """A checkpoint that is being written, to be committed when every rank has saved."""

    step: int
    folder: Path
    began: float  # time.monotonic()


class SaveFailed(RuntimeError):
    """A trainer rank could not write its part of a checkpoint."""


def mark(folder: Path, rank: int, error: str) -> None:
    """Trainer rank `rank` has written its part of `folder`, or could not: `error`. A folder that is
    gone, of an attempt that has ended, is nobody's any more."""
    name = f"{FAILED if error else SAVED}-{rank:05d}"
    try:
        write_whole(Path(folder) / name, error.encode(), sync=True)
    except OSError as trouble:
        print(f"{folder}: trainer rank {rank} could not mark its part: {trouble}", flush=True)


def marks(folder: Path) -> list[re.Match]:
    """Return the marks of ranks that have ended their part, well or not."""
    return [found for name in os.listdir(folder) if (found := MARK.fullmatch(name))]


def saved(folder: Path) -> int:
    """How many ranks have written their part. Raises `SaveFailed` with what one of them met."""
    there = marks(folder)
    for found in there:
        if found[1] == FAILED:
            why = (Path(folder) / found[0]).read_text(encoding="utf-8")
            raise SaveFailed(f"{folder}: trainer rank {int(found[2])} could not save: {why}")
    return len(there)


def _folder(run_dir: Path) -> Path:
    return Path(run_dir) / "checkpoints"


def complete(run_dir: Path) -> list[Path]:
    """Whole checkpoints, oldest first."""
    found = [d for d in _folder(run_dir).glob("step-*") if re.fullmatch(r"step-\d+", d.name)]
    return sorted(found, key=step_of)


def latest(run_dir: Path) -> Path | None:
    return (complete(run_dir) or [None])[-1]


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step-"))


def read_state(checkpoint: Path) -> dict[str, Any]:
    """The coordinator's state. Raises `ValueError` naming the file when it is damaged."""
    path = Path(checkpoint) / COORDINATOR_STATE
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(state, dict):
            raise ValueError("no JSON object")
        return state
    except (OSError, ValueError) as error:
        raise ValueError(
            f"checkpoint {checkpoint} is damaged ({path.name}: {error}); remove that folder to go "
            "on from the one before it"
        ) from None


def read_trainer(checkpoint: Path, trainer: configuration.Trainer) -> dict[str, Any]:
    """What the trainer noted beside DeepSpeed's files: updates applied, and the ranks, stage and
    dtype that saved.

    Raises `ValueError` when it is absent, or can't be continued with this configuration.
    """
    path = Path(checkpoint) / TRAINER_STATE
    if not path.is_file():
        raise ValueError(f"{path}: absent; {checkpoint} is not a checkpoint of a trainer")
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
        saved, dtype = (state["ranks"], state["zero_stage"]), state["dtype"]
    except (ValueError, LookupError, TypeError) as error:
        words = f"{type(error).__name__}: {error}"
        raise ValueError(
            f"{path} is damaged ({words}); remove that folder to go on from the one before it"
        ) from None
    if dtype != trainer.dtype:
        raise ValueError(
            f"{path}: saved with trainer.dtype={dtype}, now {trainer.dtype}; set it to {dtype}, or "
            "begin a run of another name"
        )
    now = (trainer.ranks, trainer.zero_stage)
    if saved == now:
        return state
    if not saved[1] == now[1] == 0:
        if not all((saved[1], now[1])):
            raise ValueError(
                f"{checkpoint}: {change(saved, now)}: between stage 0 and another states are not "
                f"carried over; set trainer.zero_stage={saved[1]}, or begin a run of another name"
            )
        for rank in range(saved[0]):
            name = f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
            if not any(Path(checkpoint).glob(f"*/*{name}")):
                raise ValueError(
                    f"{checkpoint}: {change(saved, now)}: {name} is absent; bring it back, or "
                    "remove that folder to go on from the checkpoint before it"
                )
    return state


def change(saved: tuple[int, int], now: tuple[int, int]) -> str:
    """Of (trainer ranks, ZeRO's stage), in words."""
    before, after = (
        f"{ranks} trainer rank{'s' * (ranks > 1)} with ZeRO {stage}"
        for ranks, stage in (saved, now)
    )
    return f"saved by {before}, continued by {after}"


def begin(run_dir: Path, step: int) -> Path:
    """An empty folder for the trainer ranks to write into."""
    folder = _folder(run_dir) / f"step-{step:06d}.tmp"
    remove_halves(run_dir)
    folder.mkdir(parents=True)
    return folder


def remove_halves(run_dir: Path) -> None:
    """Remove what an interrupted attempt left: the next one may need the room."""
    for left in _folder(run_dir).glob("step-*.tmp"):
        shutil.rmtree(left)


def commit(folder: Path, state: dict[str, Any], keep: int, spared: Collection[int] = ()) -> Path:
    """Add the coordinator's state, make `folder` a checkpoint, remove all but the `keep` newest and
    those of the steps `spared`. The ranks have brought their files to the disk."""
    write_whole(folder / COORDINATOR_STATE, json.dumps(state, indent=1).encode(), sync=True)
    for path in (folder, *(path for path in folder.rglob("*") if path.is_dir())):
        sync(path)
    final = folder.with_suffix("")
    shutil.rmtree(final, ignore_errors=True)  # of an attempt that was interrupted and is made again
    os.rename(folder, final)
    sync(final.parent)
    remove_old(final.parent.parent, keep, spared)
    return final


def remove_old(run_dir: Path, keep: int, spared: Collection[int] = ()) -> None:
    """Remove all checkpoints but the `keep` newest and those of the steps `spared`."""
    for old in complete(run_dir)[:-keep]:
        if step_of(old) not in spared:
            shutil.rmtree(old.rename(old.with_suffix(".tmp")))  # half-deleted, it is no checkpoint
