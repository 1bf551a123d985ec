"""Note the Slurm jobs that a run has asked for, in status/ of its folder: lent.json has the jobs
that lend it engines, rewards.json those that compute rewards."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

from rose.files import write_whole
from rose.launch import commands

ENGINES, REWARDS = "lent", "rewards"


def note(run_dir: Path, jobs: dict[str, str], kind: str = ENGINES) -> None:
    """Write down the run's jobs, request -> job id, for its next attempt and for `cancel_all`."""
    path = _path(run_dir, kind)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, (json.dumps(jobs) + "\n").encode())


def noted(run_dir: Path, kind: str = ENGINES) -> dict[str, str]:
    """Return the run's noted jobs, request -> job id."""
    path = _path(run_dir, kind)
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def cancel_all(run_dir: Path) -> None:
    """Cancel the jobs that a run which has ended had asked for. Prints Slurm's refusal."""
    jobs = [job for kind in (ENGINES, REWARDS) for job in noted(run_dir, kind).values()]
    if not jobs:
        return
    try:
        commands.ask(["scancel", *jobs])
        print(f"scancel {' '.join(jobs)}: done", flush=True)
    except commands.SlurmError as error:
        print(error, flush=True)
    with suppress(OSError):  # a full disk, which must not hide the run's end
        for kind in (ENGINES, REWARDS):
            note(run_dir, {}, kind)


def _path(run_dir: Path, kind: str) -> Path:
    return Path(run_dir) / "status" / f"{kind}.json"
