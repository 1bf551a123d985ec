"""Keep a small JSON file per rank, status/attempt-NNN/rank-<k>.json: is the rank running or done,
and how did it end.

The rank and its guard write the file. The launcher reads it, on a cluster from another host, and
users can read it too. Left out: progress, which is in metrics.jsonl.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Literal

import msgspec

from rose import files, processes
from rose.protocol import Role


class RankStatus(msgspec.Struct, frozen=True, kw_only=True):
    rank: int
    role: Role
    index: int
    pid: int
    guard_pid: int  # pid of the guard, the rank's parent, which reports how the rank ends
    host: str
    state: Literal["running", "done", "failed"]
    # The rank has joined the MPI world and passed its first collectives, which have no deadline.
    joined: bool = False
    # Collectives and micro-batches that a trainer rank has begun; None outside a step.
    begun: int | None = None
    beat_s: float = 0.0  # seconds between two reports of `begun`
    error: str = ""  # the rank's exception, or why its guard has killed it
    exit_code: int | None = None  # negative: minus the signal that killed it, as in subprocess
    since: float = 0.0  # wall clock, seconds: when this status was written

    def how_it_ended(self) -> str:
        if self.exit_code is None:
            ended = "vanished (its process is gone)"
        elif self.exit_code < 0:
            ended = f"killed by {processes.signal_name(-self.exit_code)}"
        else:
            ended = f"exited with code {self.exit_code}"
        return f"{ended}: {self.error}" if self.error else ended


def folder(run_dir: Path, attempt: int) -> Path:
    return Path(run_dir) / "status" / f"attempt-{attempt:03d}"


def write(run_dir: Path, attempt: int, status: RankStatus) -> None:
    """Write the status atomically, with `since` set to now: a reader sees the old file or the new
    one. Raises OSError on a full disk."""
    path = folder(run_dir, attempt) / f"rank-{status.rank}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    files.write_whole(path, msgspec.json.encode(msgspec.structs.replace(status, since=time.time())))


def mark_joined(run_dir: Path, attempt: int, rank: int) -> None:
    """Report that this rank has joined the MPI world. Raises OSError as `write` does."""
    write(run_dir, attempt, msgspec.structs.replace(read(run_dir, attempt, rank), joined=True))


def mark_begun(run_dir: Path, attempt: int, rank: int, begun: int | None, beat_s: float) -> None:
    """Report what this trainer rank has begun; None: the step is over. Raises OSError as `write`
    does."""
    last = read(run_dir, attempt, rank)
    write(run_dir, attempt, msgspec.structs.replace(last, begun=begun, beat_s=beat_s))


def read(run_dir: Path, attempt: int, rank: int) -> RankStatus:
    return msgspec.json.decode(
        (folder(run_dir, attempt) / f"rank-{rank}.json").read_bytes(), type=RankStatus
    )


def read_all(run_dir: Path, attempt: int) -> dict[int, RankStatus]:
    """Return the status of every rank that has reported, by rank."""
    found = (
        msgspec.json.decode(path.read_bytes(), type=RankStatus)
        for path in folder(run_dir, attempt).glob("rank-*.json")
    )
    return {status.rank: status for status in found}
