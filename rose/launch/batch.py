"""The batch process of a Slurm job, which notes signals from its first line to its last.

    python -m rose.launch.batch FOLDER

Slurm may warn a job (SIGUSR2) or end it (SIGTERM) at any time. Until Python runs, the job's shell
keeps these signals (rose/launch/sbatch.py). The shell passes them on once this process has sent it
SIGUSR1. From then on this process appends signals to `received`, and the work that submitit
stored in FOLDER acts on them. submitit's own handlers, which requeue the job or raise, are not
installed. Only the standard library is imported until signals are noted. Left out: acting on them.
"""

from __future__ import annotations

import os
import signal
import sys

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2)
# Variable with the pid of the job's shell. This process sends it SIGUSR1 once it notes signals.
SHELL = "ROSE_BATCH_SHELL"

# Signals in the order of their arrival, each number once. Slurm may send a signal both to this
# process and to the shell, which passes it on.
received: list[int] = []


class RunFailed(RuntimeError):
    """The run ended in failure; the message is the cause. Slurm then reports the job as FAILED."""


class EndedBySlurm(RunFailed):
    """Slurm is ending the job already, and may have requeued it. Jobs that lend engines or compute
    rewards are left to the next attempt. If there is none, these jobs end by themselves."""


def remember() -> None:
    """Handle `SIGNALS` by noting them in `received`."""
    for number in SIGNALS:
        signal.signal(number, _note)


def ignore() -> None:
    """Ignore `SIGNALS` from now on. Before Python exits, it restores the default action of handled
    signals. A late signal would then replace the job's exit code with its own."""
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
    # Other modules import `received` from rose.launch.batch. This module, __main__, has its own.
    from rose.launch import batch

    try:
        code = batch.main(sys.argv[1])
    finally:
        batch.ignore()
    sys.exit(code)
