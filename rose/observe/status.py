"""Keep a run's state in two files. The coordinator writes `<run_dir>/live.json`, the present state,
and the terminal reads it. The launcher writes `status/attempt-NNN/failure.txt`, the reason why an
attempt failed, and the report reads it."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from rose.files import write_whole

FILE = "live.json"
FAILURE = "failure.txt"


def write_failure(run_dir: Path, attempt: int, text: str) -> None:
    """Write why an attempt failed, if the disk has room for it."""
    with suppress(OSError):
        write_whole(_failure(run_dir, attempt), text.encode("utf-8", "replace"))


def read_failure(run_dir: Path) -> str:
    """Return why the run's last attempt failed; "" if it did not fail or has not ended."""
    with suppress(OSError):
        if found := numbers(Path(run_dir) / "status"):
            return _failure(run_dir, found[-1]).read_text(encoding="utf-8", errors="replace")
    return ""


def numbers(folder: Path) -> list[int]:
    """Return the numbers of the attempts that have an entry `attempt-N` in `folder`, in order."""
    names = (path.name.removeprefix("attempt-") for path in folder.glob("attempt-*"))
    return sorted(int(name) for name in names if name.isdecimal())


def _failure(run_dir: Path, attempt: int) -> Path:
    return Path(run_dir) / "status" / f"attempt-{attempt:03d}" / FAILURE


class WorkerStatus(msgspec.Struct, frozen=True):
    """The state of one rollout engine."""

    tokens_per_s: float = 0.0  # mean of the last seconds
    running: int = 0  # requests
    waiting: int = 0  # requests
    version: int = -1  # policy version; -1: none yet


class Status(msgspec.Struct, frozen=True):
    """The state of a run. `phase`: starting, evaluating, rollout, train, sync, done. Times: wall
    clock, seconds."""

    phase: str = "starting"
    step: int = 0
    steps: int = 0
    waiting_for: str = ""
    finished: int = 0  # trajectories of this phase that have ended
    total: int = 0  # trajectories of this phase
    workers: dict[str, WorkerStatus] = {}
    started: float = 0.0
    time: float = 0.0


class LiveStatus:
    """Writes the status at most once in `interval` seconds, and at once when the phase or the step
    changes."""

    def __init__(self, run_dir: Path | str, interval: float = 0.5):
        self._path = Path(run_dir) / FILE
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._interval = interval
        self._written = float("-inf")  # monotonic
        self.status = Status(started=time.time())
        self._write()

    def update(self, **fields: Any) -> None:
        """Change fields of `Status`, and write it if due. Raises TypeError for unknown names."""
        before = self.status
        self.status = msgspec.structs.replace(before, **fields)
        moved = (before.phase, before.step) != (self.status.phase, self.status.step)
        if moved or time.monotonic() - self._written >= self._interval:
            self._write()

    def close(self) -> None:
        """Write the last status, even within `interval`."""
        self._write()

    def _write(self) -> None:
        self.status = msgspec.structs.replace(self.status, time=time.time())
        # A run doesn't need this file, so a full disk must not end the run here. The run ends when
        # data that must be kept can't be written.
        with suppress(OSError):
            write_whole(self._path, msgspec.json.encode(self.status))
        self._written = time.monotonic()


def read_status(run_dir: Path | str) -> Status | None:
    """Return the last status written; None if there is none yet."""
    try:
        return msgspec.json.decode((Path(run_dir) / FILE).read_bytes(), type=Status)
    except FileNotFoundError:
        return None
