"""Show how far a run has come and what it has cost. If it is a Slurm job, also show the state and
exit reason of every component, and the ranks that failed.

    python -m rose.launch.state outputs/NAME [outputs/OTHER ...]

Asks squeue, and sacct for jobs that ended some time ago.
"""

from __future__ import annotations

import argparse
import re
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from rose.files import write_whole
from rose.launch import logs, rank_status
from rose.launch.commands import own_environment
from rose.observe import disk, terminal
from rose.observe.status import Status, numbers, read_status
from rose.trainer import checkpoint

COMMAND_DEADLINE_S = 30.0  # seconds for squeue or sacct, while a user waits at the terminal
# States of a job that runs or may run again. A PREEMPTED job that was requeued is PENDING.
ACTIVE = {
    "PENDING",
    "RUNNING",
    "REQUEUED",
    "REQUEUE_FED",
    "REQUEUE_HOLD",
    "RESIZING",
    "RESV_DEL_HOLD",
    "SPECIAL_EXIT",
    "STOPPED",
    "SUSPENDED",
    "COMPLETING",
    "CONFIGURING",
    "SIGNALING",
    "STAGE_OUT",
}
STARTED = {"RUNNING", "STOPPED", "SUSPENDED"}  # states of a job that has its nodes
# States of a job that ended by itself or by the cluster: the end of its log is shown.
FAILED = {"FAILED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE"}
TAIL_LINES = 15  # lines of a failed job's log that are shown
# Reasons of squeue's for which a job waits until the job or a limit is changed (squeue's manual).
REFUSED = re.compile(
    r"(QOS|Assoc)(Max|Min)\w*PerJob|PartitionTimeLimit|InvalidQOS|InvalidAccount|BadConstraints"
)
# Part of squeue's message for a job that ended some minutes ago, or never existed.
UNKNOWN_JOB = "invalid job id"
FIELDS = ("JobID", "State", "ExitCode", "Reason", "NodeList", "Elapsed")  # sacct's names


class JobState(NamedTuple):
    """The state of one component of a job, as Slurm reports it."""

    job: str  # id: 12+0, or 12 if the job has one component
    state: str
    exit_code: str
    reason: str
    nodes: str
    elapsed: str


def remember(run_dir: Path, job: str) -> None:
    """Record the id of the job that a run was submitted as."""
    path = _job_file(run_dir)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, f"{job}\n".encode())


def submitted(run_dir: Path) -> str | None:
    """Return the id of the job that the run was last submitted as; None if it never was. Raises
    RuntimeError if the file with the id can't be read, or holds no id."""
    path = _job_file(run_dir)
    try:
        job = path.read_text(encoding="utf-8").strip()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise RuntimeError(f"{path}, which names the run's Slurm job: {error}") from None
    if not job.isdecimal():
        raise RuntimeError(f"{path}: {job[:80]!r} is no id of a Slurm job")
    return job


def components(job: str) -> list[JobState]:
    """Return every component's state; empty if Slurm no longer knows the job, or has no commands
    here. Rows of the controller (squeue) override rows of the accounting (sacct), which is a moment
    late but remembers a job for longer.

    Raises RuntimeError if Slurm doesn't answer, or prints no states of jobs. So a run doesn't count
    as ended because the controller was busy.
    """
    sacct = ["sacct", "--noheader", "--parsable2", "--allocations", "--format", ",".join(FIELDS)]
    squeue = ["squeue", "--noheader", "--states=all", "--format=%i|%T||%r|%N|%M"]
    rows = [*_rows([*sacct, "--jobs", job]), *_rows([*squeue, "--jobs", job])]
    found = {row.job: row for row in rows}
    return [found[name] for name in sorted(found)]


def is_active(job: str) -> bool:
    """True while the job waits, runs, or is about to do so again."""
    return _any_active(components(job))


def cannot_start(job: str) -> str:
    """Return why a waiting job will never start; "" for any other job. There are two reasons:
    1. The job asks for more than a limit allows.
    2. One of its components has ended. Slurm (22.05) leaves a heterogeneous job in this state if
       somebody set the node of its first component DOWN while the node's slurmd lived on."""
    found = components(job)
    states = {component.job: component.state for component in found}
    ended = [name for name, state in states.items() if state not in ACTIVE]
    if "PENDING" not in states.values():
        return ""
    refused = {c.reason for c in found if c.state == "PENDING" and REFUSED.match(c.reason)}
    if refused:
        return (
            f"it asks for more than the site's limits allow ({', '.join(sorted(refused))}), so "
            f"Slurm will not start it: `scancel {job}`, then submit with what they allow. Time, "
            "qos, account, partition, constraint, nodes, GPUs and CPUs are keys of "
            "cluster.slurm.trainer and cluster.slurm.rollout"
        )
    if not ended:
        return ""
    return (
        f"its component {', '.join(ended)} has ended, so Slurm will never start the rest: `scancel "
        f"{job}`, and the same launch.py command continues the run"
    )


def _any_active(found: list[JobState]) -> bool:
    return any(component.state in ACTIVE for component in found)


def show(run_dir: Path, console: Console) -> bool:
    """Print the state; return False if the run has no job. Raises RuntimeError as `components` and
    `submitted` do, after printing what the run's folder has."""
    job = submitted(run_dir)
    if job is None:
        return False
    try:
        found = components(job)
    except RuntimeError:
        console.print(f"job {job}, without Slurm's answer:", soft_wrap=True)
        _show_ranks(run_dir, None, console)
        show_run(run_dir, console)
        raise
    table = Table(title=escape(f"{run_dir.name}: job {job}"))
    for name in FIELDS:
        table.add_column(name)
    for component in found:
        table.add_row(*map(escape, component))  # brackets in lists of nodes, which are no markup
    if found:
        console.print(table)
    elif shutil.which("squeue") is None:
        console.print(
            f"job {job}: no squeue on PATH, so its state is unknown; give this command where your "
            "site has Slurm's commands (a login node)",
            soft_wrap=True,
        )
    else:
        console.print(f"job {job}: Slurm knows nothing of it any more", soft_wrap=True)
    if reason := cannot_start(job):
        console.print(reason, soft_wrap=True)
    _show_failure(run_dir, job, found, console)
    _show_ranks(run_dir, found, console)
    show_run(run_dir, console)
    return True


def _show_failure(run_dir: Path, job: str, found: list[JobState], console: Console) -> None:
    """Print the end of a failed job's log, or why there is none."""
    ended = [component.state for component in found]
    if not set(ended) & FAILED or _any_active(found):
        return
    log = run_dir / "logs" / f"slurm-{job}.out"
    if lines := logs.tail(log, TAIL_LINES):
        # Drop a program's escape sequences, which would act on this terminal.
        plain = ("".join(filter(str.isprintable, line)) for line in lines)
        words = "\n".join([f"last lines of {log}:", *(f"  {line}" for line in plain)])
    else:
        words = (
            f"{log} is missing or empty: the node could not write it; does it see "
            f"{run_dir.parent} (output_dir)? `rose doctor cluster=slurm --folder "
            f"{shlex.quote(str(run_dir.parent))}` tries it"
        )
    terminal.echo(console, words)


def show_run(run_dir: Path, console: Console) -> bool:
    """Print how far the run has come and what it has cost; return False if neither is known. Raises
    RuntimeError if the files can't be read."""
    try:
        status = read_status(run_dir)
    except NotADirectoryError:
        return False
    except (OSError, msgspec.MsgspecError) as error:
        raise RuntimeError(f"its status can't be read: {error}") from None
    if status is not None:
        terminal.echo(console, progress(run_dir, status))
    known = terminal.show_cost(run_dir, console) or status is not None
    if known:
        disk.show(run_dir, console)
    return known


def progress(run_dir: Path, status: Status) -> str:
    """Return one line: the step, its phase, how long ago the run reported them, and the last saved
    step."""
    newest = checkpoint.latest(run_dir)
    saved = f"saved after step {checkpoint.step_of(newest)}" if newest else "nothing is saved yet"
    if status.phase == "done":
        return f"{run_dir.name}: finished after step {status.step} of {status.steps}; {saved}"
    waits = f", waiting for {status.waiting_for}" if status.waiting_for else ""
    age = f"{max(0.0, time.time() - status.time):,.0f} s ago"
    return (
        f"{run_dir.name}: step {status.step} of {status.steps}, {status.phase}{waits} ({age}); "
        f"{saved}"
    )


def _show_ranks(run_dir: Path, found: list[JobState] | None, console: Console) -> None:
    """Print how many of the last attempt's ranks run, and how the others ended. `found`: the job's
    components; None: unknown."""
    attempts = numbers(run_dir / "status")
    if not attempts:
        return
    attempt = attempts[-1]
    try:
        ranks = rank_status.read_all(run_dir, attempt)
    except (OSError, msgspec.MsgspecError) as error:
        raise RuntimeError(f"{rank_status.folder(run_dir, attempt)}: {error}") from None
    # If Slurm killed a rank together with its guard, its status stays "running".
    active = found is None or _any_active(found)
    running = "running" if active else "ended with the job"
    states = [running if status.state == "running" else status.state for status in ranks.values()]
    counted = [
        f"{states.count(name)} {name}" for name in (running, "done", "failed") if name in states
    ]
    console.print(
        f"attempt {attempt}: {len(ranks)} ranks" + "; " * bool(counted) + ", ".join(counted)
    )
    for status in ranks.values():
        if status.state == "failed":
            terminal.echo(
                console,
                f"  rank {status.rank} ({status.role.value} {status.index}) on {status.host} "
                f"{status.how_it_ended()}",
            )


def _rows(command: list[str]) -> list[JobState]:
    """Return the states that the command prints. Raises RuntimeError if it prints lines, but none
    with a job's state."""
    lines = [line for line in (_ask(command) or "").splitlines() if line.strip()]
    rows = [line.split("|") for line in lines]
    found = [JobState(*row[: len(FIELDS)]) for row in rows if len(row) >= len(FIELDS)]
    if lines and not found:
        raise RuntimeError(f"{command[0]} printed {lines[0][:80]!r}, which is no state of a job")
    return [row._replace(state=row.state.split(" by ")[0]) for row in found]


def _ask(command: list[str]) -> str | None:
    """Return what the command prints. Return None if the command is missing, if this cluster
    doesn't have its service (sacct), or if the job is unknown. Raises RuntimeError if Slurm doesn't
    answer."""
    name = command[0]
    if shutil.which(name) is None:
        return None
    try:
        done = subprocess.run(
            command, env=own_environment(), capture_output=True, timeout=COMMAND_DEADLINE_S
        )
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"{name} did not answer within {COMMAND_DEADLINE_S:g} s") from None
    except OSError as error:
        raise RuntimeError(f"{name} can't be run: {error.strerror or error}") from None
    if done.returncode == 0:
        return done.stdout.decode(errors="replace")
    output = done.stderr.decode(errors="replace").strip()
    if name == "squeue" and UNKNOWN_JOB not in output.lower():
        last = output.splitlines()[-1] if output else f"exit code {done.returncode}, no output"
        raise RuntimeError(f"squeue failed: {last}")
    return None


def _job_file(run_dir: Path) -> Path:
    return Path(run_dir) / "status" / "job"


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m rose.launch.state",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", type=Path, nargs="+", help="the run's folder, or several")
    console = Console(width=shutil.get_terminal_size((120, 24)).columns)
    return max(_state_of(run_dir, console) for run_dir in parser.parse_args().run)


def _state_of(run_dir: Path, console: Console) -> int:
    """Print the state of one run; return the exit code."""
    try:
        if show(run_dir, console) or show_run(run_dir, console):
            return 0
    except RuntimeError as error:
        print(f"{run_dir}: {error}", file=sys.stderr)
        return 1
    print(f"{run_dir}: no run there that has begun, or was submitted to Slurm", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
