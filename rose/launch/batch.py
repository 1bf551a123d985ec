"""The batch process of a Slurm job, which notes signals from its first line to its last.

    python -m rose.launch.batch FOLDER

Slurm may warn a job (SIGUSR2) or end it (SIGTERM) at any time. Until Python runs, the job's shell
keeps these signals (rose/launch/sbatch.py). It passes them on once this process has signalled that
it is ready. From then on they are in `received`, and the work that submitit stored in FOLDER
handles them. submitit's own handlers, which requeue the job by its rules or raise, are not
installed. Only the standard library is imported until signals are noted. Left out: obeying signals.
"""

from __future__ import annotations

import os
import signal
import sys

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2)
# Variable with the pid of the job's shell, which gets SIGUSR1 once this process notes signals.
SHELL = "ROSE_BATCH_SHELL"

# Signals in the order of their arrival, each number once: Slurm may send one signal both to the
# shell, which passes it on, and to this process.
received: list[int] = []


class RunFailed(RuntimeError):
    """The run ended in failure; the message is the cause. Slurm then reports the job as FAILED."""


class EndedBySlurm(RunFailed):
    """Slurm ends the job already, and may have requeued it. The next attempt adopts the jobs that
    lend engines or compute rewards. Without one, they end by themselves."""


def remember() -> None:
    """Handle `SIGNALS` by noting them in `received`."""
    for number in SIGNALS:
        signal.signal(number, _note)


def ignore() -> None:
    """Ignore `SIGNALS` from now on. Python gives signals with a handler their default action back
    before it exits, so that a late one would replace the job's exit code with the signal's."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def _note(number: int, _) -> None:
    if number not in received:
        received.append(number)


def main(folder: str) -> int:
    """Run what submitit has stored in `folder`; return the process's exit code."""
    remember()
    if shell := os.environ.pop(SHELL, ""):
        os.kill(int(shell), signal.SIGUSR1)
    from submitit.core import job_environment, submission

    job_environment.JobEnvironment._handle_signals = lambda *_: None
    try:
        submission.process_job(folder)
    except Exception as error:
        from rose.config import ConfigError

        if not isinstance(error, (ConfigError, RunFailed)):
            raise
        print(f"failed: {error}", flush=True)
        return 1
    return 0


if __name__ == "__main__":
    # Others import `received` from rose.launch.batch, which is another module than __main__.
    from rose.launch import batch

    try:
        code = batch.main(sys.argv[1])
    finally:
        batch.ignore()
    sys.exit(code)
