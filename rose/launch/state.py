"""What became of a run's Slurm job: every component's state and exit reason, and the ranks that
failed.

    python -m rose.launch.state outputs/NAME
Asks squeue, and sacct for jobs that ended some time ago.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from rose.launch import rank_status

COMMAND_DEADLINE_S = 30.0
# a PREEMPTED job that comes back is PENDING
ACTIVE = {
    "PENDING",
    "RUNNING",
    "REQUEUED",
    "REQUEUE_HOLD",
    "RESIZING",
    "SUSPENDED",
    "COMPLETING",
    "CONFIGURING",
    "SIGNALING",
    "STAGE_OUT",
}
FIELDS = ("JobID", "State", "ExitCode", "Reason", "NodeList", "Elapsed")


class JobState(NamedTuple):
    """One component of a job, as Slurm tells it."""

    job: str  # 12+0, or 12 if the job has one component
    state: str
    exit_code: str
    reason: str
    nodes: str
    elapsed: str


def remember(run_dir: Path, job: str) -> None:
    """Note the job that a run was submitted as."""
    path = _note(run_dir)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(job + "\n")
    part.replace(path)


def submitted(run_dir: Path) -> str | None:
    """Id of the job that the run was last submitted as; None if it never was."""
    path = _note(run_dir)
    return path.read_text().strip() if path.exists() else None


def components(job: str) -> list[JobState]:
    """Every component's state; empty when Slurm no longer knows the job. Raises RuntimeError when
    Slurm doesn't answer.

    The controller (squeue) is believed before the accounting (sacct), which hears of a job a moment
    later but knows it for longer.
    """
    found = {
        row.job: row
        for row in (
            *_rows(
                [
                    "sacct",
                    "--noheader",
                    "--parsable2",
                    "--allocations",
                    "--format",
                    ",".join(FIELDS),
                    "--jobs",
                    job,
                ]
            ),
            *_rows(
                ["squeue", "--noheader", "--states=all", "--format=%i|%T||%r|%N|%M", "--jobs", job]
            ),
        )
    }
    return [found[name] for name in sorted(found)]


def is_active(job: str) -> bool:
    """True while the job waits, runs, or is about to do so again."""
    return _any_active(components(job))


def cannot_start(job: str) -> str:
    """Why a job that waits will wait for ever; '' for any other. Slurm (22.05) leaves a
    heterogeneous job so when the node of its first component was set DOWN by hand while its slurmd
    lived on."""
    states = {component.job: component.state for component in components(job)}
    over = [name for name, found in states.items() if found not in ACTIVE]
    if "PENDING" not in states.values() or not over:
        return ""
    return (
        f"its component {', '.join(over)} has ended, so Slurm will never start the rest: `scancel "
        f"{job}`, and the same launch.py command continues the run"
    )


def _any_active(found: list[JobState]) -> bool:
    return any(component.state in ACTIVE for component in found)


def show(run_dir: Path, console: Console) -> bool:
    """Print the state; False when nothing is known of a job."""
    job = submitted(run_dir)
    if job is None:
        return False
    table = Table(title=f"{run_dir.name}: job {job}")
    for name in FIELDS:
        table.add_column(name)
    found = components(job)
    for component in found:
        table.add_row(*component)
    console.print(table)
    if hopeless := cannot_start(job):
        console.print(hopeless, soft_wrap=True)
    attempts = sorted((run_dir / "status").glob("attempt-*"))
    if attempts:
        attempt = int(attempts[-1].name.removeprefix("attempt-"))
        ranks = rank_status.read_all(run_dir, attempt)
        # nobody is left to write how a rank ended that Slurm ended together with its guard
        running = "running" if _any_active(found) else "ended with the job"
        states = [
            running if status.state == "running" else status.state for status in ranks.values()
        ]
        console.print(
            f"attempt {attempt}: {len(ranks)} ranks; "
            + ", ".join(
                f"{states.count(name)} {name}"
                for name in (running, "done", "failed")
                if name in states
            )
        )
        for status in ranks.values():
            if status.state == "failed":
                console.print(
                    f"  rank {status.rank} ({status.role.value} {status.index}) on {status.host} "
                    f"{status.how_it_ended()}",
                    markup=False,
                    soft_wrap=True,
                )
    return True


def _rows(command: list[str]) -> list[JobState]:
    rows = [line.split("|") for line in (_ask(command) or "").splitlines()]
    found = [JobState(*row[: len(FIELDS)]) for row in rows if len(row) >= len(FIELDS)]
    return [row._replace(state=row.state.split(" by ")[0]) for row in found]


def _ask(command: list[str]) -> str | None:
    """What it prints; None if it is absent or refuses."""
    if shutil.which(command[0]) is None:
        return None
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_DEADLINE_S)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"{command[0]} did not answer within {COMMAND_DEADLINE_S:g} s") from None
    return done.stdout if done.returncode == 0 else None


def _note(run_dir: Path) -> Path:
    return Path(run_dir) / "status" / "job"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, help="the run's folder")
    run_dir = parser.parse_args().run
    try:
        if show(
            run_dir,
            Console(width=None if sys.stdout.isatty() else int(os.environ.get("COLUMNS", 120))),
        ):
            return 0
    except RuntimeError as error:
        print(f"{run_dir}: {error}", file=sys.stderr)
        return 1
    print(f"{run_dir}: no run that was submitted to Slurm (it has no status/job)", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
