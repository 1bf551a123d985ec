"""One small JSON file per rank, status/attempt-NNN/rank-<k>.json: is it running, done, or how did
it end.

Written by the rank and by its guard, read by the launcher (and on a cluster by anybody who sees the
run's folder). Left out: progress, which is in metrics.jsonl.
"""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Literal

import msgspec

from rose import files
from rose.protocol import Role


class RankStatus(msgspec.Struct, frozen=True, kw_only=True):
    rank: int
    role: Role
    index: int
    pid: int
    host: str
    state: Literal["running", "done", "failed"]
    # the MPI world: its first collectives, which have no deadline of their own, are behind it
    joined: bool = False
    # a trainer's collectives and micro-batches, told every `beat_s` seconds of a step
    begun: int | None = None
    beat_s: float = 0.0
    error: str = ""  # the exception, in the rank's own words, or why its guard has ended it
    exit_code: int | None = None  # negative: minus the signal that killed it, as in subprocess
    since: float = 0.0  # wall clock, seconds: when this state was entered

    def how_it_ended(self) -> str:
        if self.exit_code is None:
            ended = "vanished (its process is gone)"
        elif self.exit_code < 0:
            ended = f"killed by {signal.Signals(-self.exit_code).name}"
        else:
            ended = f"exited with code {self.exit_code}"
        return f"{ended}: {self.error}" if self.error else ended


def folder(run_dir: Path, attempt: int) -> Path:
    return Path(run_dir) / "status" / f"attempt-{attempt:03d}"


def write(run_dir: Path, attempt: int, status: RankStatus) -> None:
    """Atomic: a reader sees the old file or the new one. Sets `since` to now. Raises OSError on a
    full disk."""
    path = folder(run_dir, attempt) / f"rank-{status.rank}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    files.write_whole(path, msgspec.json.encode(msgspec.structs.replace(status, since=time.time())))


def mark_joined(run_dir: Path, attempt: int, rank: int) -> None:
    """Said by the rank itself. Raises OSError as `write` does."""
    write(run_dir, attempt, msgspec.structs.replace(read(run_dir, attempt, rank), joined=True))


def mark_begun(run_dir: Path, attempt: int, rank: int, begun: int | None, beat_s: float) -> None:
    """Said by a trainer rank itself; null: the step is over. Raises OSError as `write` does."""
    last = read(run_dir, attempt, rank)
    write(run_dir, attempt, msgspec.structs.replace(last, begun=begun, beat_s=beat_s))


def read(run_dir: Path, attempt: int, rank: int) -> RankStatus:
    return msgspec.json.decode(
        (folder(run_dir, attempt) / f"rank-{rank}.json").read_bytes(), type=RankStatus
    )


def read_all(run_dir: Path, attempt: int) -> dict[int, RankStatus]:
    """Every rank that has reported, by rank."""
    found = (
        msgspec.json.decode(path.read_bytes(), type=RankStatus)
        for path in folder(run_dir, attempt).glob("rank-*.json")
    )
    return {status.rank: status for status in found}
