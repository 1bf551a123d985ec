"""Checkpoints of a run: a folder per step, complete or absent.

The trainer ranks fill ``checkpoints/step-000010.tmp/``, and each marks its part when all of it is
on disk. Then the coordinator adds its own state and renames the folder to ``step-000010/``. So a
folder without ``.tmp`` is complete, whenever the job was killed.
"""

from __future__ import annotations

import itertools
import json
import operator
import os
import re
import shutil
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rose import config as configuration
from rose.files import write_whole
from rose.transfer.store import sync

COORDINATOR_STATE, TRAINER_STATE = "coordinator.json", "trainer.json"
SAVED, FAILED = "saved", "failed"  # names of the trainer ranks' marks
MARK = re.compile(rf"({SAVED}|{FAILED})-(\d+)")  # no match for a mark's temporary name


@dataclass
class Save:
    """A checkpoint that is being written, to be committed when every rank has saved."""

    step: int
    folder: Path
    began: float  # time.monotonic()


class SaveFailed(RuntimeError):
    """A trainer rank could not write its part of a checkpoint."""


def mark(folder: Path, rank: int, error: str) -> None:
    """Mark the part of trainer rank `rank` in `folder` as saved or, with an `error`, as failed. If
    the mark can't be written, only print: the folder of an attempt that ended may be gone."""
    name = f"{FAILED if error else SAVED}-{rank:05d}"
    try:
        write_whole(Path(folder) / name, error.encode(), sync=True)
    except OSError as trouble:
        print(f"{folder}: trainer rank {rank} could not mark its part: {trouble}", flush=True)


def marks(folder: Path) -> list[re.Match]:
    """Return the marks of the ranks that saved their part or failed."""
    return [found for name in os.listdir(folder) if (found := MARK.fullmatch(name))]


def saved(folder: Path) -> int:
    """Count the ranks that saved their part. Raises `SaveFailed` with a failed rank's error."""
    there = marks(folder)
    for found in there:
        if found[1] == FAILED:
            why = (Path(folder) / found[0]).read_text(encoding="utf-8")
            raise SaveFailed(f"{folder}: trainer rank {int(found[2])} could not save: {why}")
    return len(there)


def _folder(run_dir: Path) -> Path:
    return Path(run_dir) / "checkpoints"


def complete(run_dir: Path) -> list[Path]:
    """List the complete checkpoints, oldest first."""
    found = [d for d in _folder(run_dir).glob("step-*") if re.fullmatch(r"step-\d+", d.name)]
    return sorted(found, key=step_of)


def latest(run_dir: Path) -> Path | None:
    return (complete(run_dir) or [None])[-1]


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step-"))


def read_state(checkpoint: Path) -> dict[str, Any]:
    """Read the coordinator's state. Raises `ValueError` that names the file when it is damaged."""
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
    """Read the trainer's note beside DeepSpeed's files: the number of updates, and the ranks, ZeRO
    stage and dtype of the run that saved.

    Raises `ValueError` if it is absent or damaged, or if this configuration can't continue."""
    path = Path(checkpoint) / TRAINER_STATE
    if not path.is_file():
        raise ValueError(f"{path}: absent; {checkpoint} is not a checkpoint of a trainer")
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
        ranks, stage, _ = (operator.index(state[key]) for key in ("ranks", "zero_stage", "updates"))
        saved, dtype = (ranks, stage), state["dtype"]
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
                f"{checkpoint}: {change(saved, now)}: states can't be carried over between stage 0 "
                f"and another; set trainer.zero_stage={saved[1]}, or begin a run of another name"
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
    """Describe the change from one (trainer ranks, ZeRO's stage) to another, for messages."""
    before, after = (
        f"{ranks} trainer rank{'s' * (ranks > 1)} with ZeRO {stage}"
        for ranks, stage in (saved, now)
    )
    return f"saved by {before}, continued by {after}"


def begin(run_dir: Path, step: int, report: Callable[[str], None] = print) -> Path:
    """Make an empty folder for the trainer ranks to write into."""
    folder = _folder(run_dir) / f"step-{step:06d}.tmp"
    remove_halves(run_dir, report)
    folder.mkdir(parents=True)
    return folder


def remove_halves(run_dir: Path, report: Callable[[str], None] = print) -> None:
    """Remove incomplete checkpoints of interrupted attempts, to free space for the next one."""
    for left in _folder(run_dir).glob("step-*.tmp"):
        _remove(left, report)


def commit(
    folder: Path,
    state: dict[str, Any],
    keep: int,
    spared: Collection[int] = (),
    report: Callable[[str], None] = print,
) -> Path:
    """Add the coordinator's state to `folder` and make it a checkpoint, once the ranks' files are
    on disk. Then remove all but the `keep` newest and those of the steps `spared`."""
    write_whole(folder / COORDINATOR_STATE, json.dumps(state, indent=1).encode(), sync=True)
    for path in (folder, *(path for path in folder.rglob("*") if path.is_dir())):
        sync(path)
    final = folder.with_suffix("")
    if final.exists():  # An interrupted attempt saved the same step.
        _remove(final, report)
    os.rename(folder, final)
    sync(final.parent)
    remove_old(final.parent.parent, keep, spared, report)
    return final


def remove_old(
    run_dir: Path, keep: int, spared: Collection[int] = (), report: Callable[[str], None] = print
) -> None:
    """Remove all checkpoints but the `keep` newest and those of the steps `spared`."""
    for old in complete(run_dir)[:-keep]:
        if step_of(old) not in spared:
            _remove(old, report)


def _remove(folder: Path, report: Callable[[str], None]) -> None:
    """Remove a folder. If that fails, as on NFS while somebody copies its files, report it."""
    try:
        if ".old" not in folder.suffixes:
            # Renamed first: a half-deleted folder is no checkpoint, and its name is needed again.
            names = (folder.with_suffix(f".{number}.old.tmp") for number in itertools.count())
            folder = folder.rename(next(name for name in names if not name.exists()))
        shutil.rmtree(folder)
    except OSError as error:
        report(f"{folder}: not removed ({error}); the next checkpoint tries it again")
