"""Call Slurm's commands from inside a job, and retry them until Slurm answers.

While a controller restarts or fails over, every command fails for minutes. A job that took this for
a refusal would end for no reason. Left out: commands for a user who waits at a terminal (state.py).
"""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Sequence
from datetime import datetime

DEADLINE_S = 60.0  # seconds that one call may take
# Seconds for which a failing command is retried. A failover to a backup controller takes Slurm's
# SlurmctldTimeout, two minutes by default, and the time to read its state.
PATIENCE_S = 300.0
PAUSE_S = 5.0  # seconds between two tries
# Part of Slurm's message about a job that is ending already: preempted, cancelled, or a node lost.
COMPLETING = "already completing or completed"
# Parts of messages by which Slurm refuses a command. A retry helps only after other failures.
REFUSALS = (
    "invalid job id",
    "invalid user id",
    "invalid option",
    "denied",
    "disabled",
    "not supported",
    "not permitted",
    "unrecognized",
    COMPLETING,
)
PENDING = "job is pending"  # part of Slurm's message about a requeue of a job in the queue


class SlurmError(RuntimeError):
    """A command of Slurm's was refused or not answered in time; the message quotes Slurm."""


def own_environment() -> dict[str, str]:
    """Return this process's variables without a user's defaults for Slurm's commands. SQUEUE_STATES
    and the like would hide jobs or change how they are printed."""
    theirs = ("SQUEUE_", "SACCT_", "SCONTROL_", "SLURM_TIME_FORMAT")
    return {name: value for name, value in os.environ.items() if not name.startswith(theirs)}


def refuses(message: str) -> bool:
    """True if the message is Slurm's answer (`REFUSALS`, `PENDING`), not a failure to answer."""
    return any(words in message.lower() for words in (*REFUSALS, PENDING))


def ask(
    command: Sequence[str],
    patience_s: float | None = None,
    deadline_s: float | None = None,
    **variables: str,
) -> str:
    """Run one of Slurm's commands and return what it prints. `variables` are added to its
    environment. If Slurm can't answer, retry for `patience_s` (None: PATIENCE_S). Each call may
    take `deadline_s` (None: DEADLINE_S). Raises `SlurmError`."""
    deadline_s = DEADLINE_S if deadline_s is None else deadline_s
    end = time.monotonic() + (PATIENCE_S if patience_s is None else patience_s)
    printed = ""
    while True:
        try:
            done = subprocess.run(
                command,
                env=own_environment() | variables,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=deadline_s,
            )
        except subprocess.TimeoutExpired:
            message = f"no answer within {deadline_s:g} s"
        except OSError as error:
            raise SlurmError(f"{command[0]} can't be run: {error.strerror or error}") from None
        else:
            if done.returncode == 0:
                return done.stdout.decode(errors="replace")
            message = done.stderr.decode(errors="replace").strip()
            message = message or f"exit code {done.returncode}, no output"
        if refuses(message) or time.monotonic() > end:
            raise SlurmError(f"{' '.join(command)}: {message}")
        if message != printed:
            print(f"{' '.join(command)}: {message}; asked again", flush=True)
        printed = message
        time.sleep(PAUSE_S)


def requeue(job: str, restarts: int) -> bool:
    """Have Slurm requeue this job. `restarts`: how often it had been restarted when this process
    began. Return False if Slurm has restarted it since: this process then belongs to an earlier
    attempt, on a node that Slurm takes for lost. Raises `SlurmError`."""
    try:
        shown = ask(["scontrol", "--oneliner", "show", "job", job], patience_s=0.0)
    except SlurmError:
        shown = ""
    found = re.search(r"\bRestarts=(\d+)", shown)
    if found and int(found[1]) > restarts:
        return False
    try:
        ask(["scontrol", "requeue", job])
    except SlurmError as error:
        # Slurm requeued the job already, or did so at our last call, whose answer was lost.
        if PENDING not in str(error).lower():
            raise
    return True


def end_time(deadline_s: float) -> float | None:
    """Return the time at which Slurm will end this job, in seconds of the epoch; inf without a time
    limit, None if Slurm gives no answer within `deadline_s`."""
    if given := os.environ.get("SLURM_JOB_END_TIME"):  # set since Slurm 23.02
        return float(given)
    try:
        printed = ask(
            ["squeue", "--noheader", "--format=%e", "--jobs", os.environ["SLURM_JOB_ID"]],
            patience_s=0.0,
            deadline_s=deadline_s,
            SLURM_TIME_FORMAT="standard",
        )
    except SlurmError:
        return None
    # squeue prints a local time for each component, and N/A where there is no limit.
    ends = re.findall(r"^\d{4}-\d\d-\d\dT[\d:]{8}$", printed, re.MULTILINE)
    if not printed.strip():
        return None
    return min((datetime.fromisoformat(end).timestamp() for end in ends), default=float("inf"))
