"""The batch process of a Slurm job, which remembers signals from its first line to its last.

    python -m rose.launch.batch FOLDER

Slurm may warn a job (SIGUSR2) or end it (SIGTERM) at any time. Before Python runs, the job's shell
keeps these signals (rose/launch/sbatch.py) and passes them on once this process says that it is
ready. From then on they are in `received`, for whatever FOLDER's submitted work makes of them.
submitit would set handlers of its own, which requeue the job by its rules or raise; it sets none
here. Imports only the standard library until signals are remembered. Left out: obeying signals.
"""

from __future__ import annotations

import os
import signal
import sys

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2)
# The job's shell, which gets SIGUSR1 once this process remembers signals.
SHELL = "ROSE_BATCH_SHELL"

# Signals in the order of their arrival, each number once: Slurm may send one to the shell and to
# this process, to which the shell passes it on.
received: list[int] = []


class RunFailed(RuntimeError):
    """The run ended in failure; the message is the cause. Slurm then calls the job FAILED."""


def remember() -> None:
    """Handle `SIGNALS` by noting them in `received`."""
    for number in SIGNALS:
        signal.signal(number, _note)


def _note(number: int, _) -> None:
    if number not in received:
        received.append(number)


def main(folder: str) -> int:
    """Run what submitit has stored in `folder`; the process's exit code."""
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
    from rose.launch import batch  # the module whose `received` others import, not __main__

    sys.exit(batch.main(sys.argv[1]))
