"""Two files say how a run is. `<run_dir>/live.json` says what it does now: the coordinator writes,
the terminal reads. `status/attempt-NNN/failure.txt` says why an attempt failed: the launcher
writes, the report reads."""

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
    """Note why an attempt failed, if the disk has room for that."""
    with suppress(OSError):
        write_whole(_failure(run_dir, attempt), text.encode("utf-8", "replace"))


def read_failure(run_dir: Path) -> str:
    """Return why the run's last attempt failed; "" if it did not, or has not ended."""
    folders = (Path(run_dir) / "status").glob("attempt-*")
    numbers = [int(path.name.removeprefix("attempt-")) for path in folders]
    with suppress(OSError):
        if numbers:
            return _failure(run_dir, max(numbers)).read_text(encoding="utf-8", errors="replace")
    return ""


def _failure(run_dir: Path, attempt: int) -> Path:
    return Path(run_dir) / "status" / f"attempt-{attempt:03d}" / FAILURE


class WorkerStatus(msgspec.Struct, frozen=True):
    """One rollout engine: recent tokens per second, requests running and waiting, its version."""

    tokens_per_s: float = 0.0
    running: int = 0
    waiting: int = 0
    version: int = -1


class Status(msgspec.Struct, frozen=True):
    """`phase`: starting, evaluating, rollout, train, sync, done. Times: wall clock, seconds."""

    phase: str = "starting"
    step: int = 0
    steps: int = 0
    waiting_for: str = ""
    finished: int = 0  # trajectories of this phase
    total: int = 0
    workers: dict[str, WorkerStatus] = {}
    started: float = 0.0
    time: float = 0.0


class LiveStatus:
    """Writes at most once in `interval` seconds, but at once when the phase or the step changes."""

    def __init__(self, run_dir: Path | str, interval: float = 0.5):
        self._path = Path(run_dir) / FILE
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._interval = interval
        self._written = float("-inf")  # monotonic
        self.status = Status(started=time.time())
        self._write()

    def update(self, **fields: Any) -> None:
        """Change some fields of `Status`; raises TypeError for a name it doesn't have."""
        before = self.status
        self.status = msgspec.structs.replace(before, **fields)
        moved = (before.phase, before.step) != (self.status.phase, self.status.step)
        if moved or time.monotonic() - self._written >= self._interval:
            self._write()

    def close(self) -> None:
        """Write the last word, however recent the one before."""
        self._write()

    def _write(self) -> None:
        self.status = msgspec.structs.replace(self.status, time=time.time())
        # The display is nothing that a run needs: on a full disk it must not keep a step from
        # being saved. What must be kept is written by others, which fail.
        with suppress(OSError):
            write_whole(self._path, msgspec.json.encode(self.status))
        self._written = time.monotonic()


def read_status(run_dir: Path | str) -> Status | None:
    """The last status written, or None when there is none yet."""
    try:
        return msgspec.json.decode((Path(run_dir) / FILE).read_bytes(), type=Status)
    except FileNotFoundError:
        return None
