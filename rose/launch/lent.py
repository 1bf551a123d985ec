"""The jobs that a run has asked for, which lend it engines: status/lent.json of its folder."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from rose.files import write_whole

COMMAND_DEADLINE_S = 60.0


def note(run_dir: Path, jobs: dict[str, str]) -> None:
    """Remember the run's jobs, request -> id, for its next attempt and its end."""
    path = _path(run_dir)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, (json.dumps(jobs) + "\n").encode())


def noted(run_dir: Path) -> dict[str, str]:
    path = _path(run_dir)
    return json.loads(path.read_text()) if path.exists() else {}


def cancel_all(run_dir: Path) -> None:
    """The run is over: give back what it asked for. Prints what Slurm refuses."""
    jobs = list(noted(run_dir).values())
    if not jobs:
        return
    done = subprocess.run(
        ["scancel", *jobs], capture_output=True, text=True, timeout=COMMAND_DEADLINE_S
    )
    print(f"scancel {' '.join(jobs)}: {done.stderr.strip() or 'done'}", flush=True)
    note(run_dir, {})


def _path(run_dir: Path) -> Path:
    return Path(run_dir) / "status" / "lent.json"
