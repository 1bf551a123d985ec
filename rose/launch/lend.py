"""Jobs that lend a run one more engine. `python -m rose.launch.lend RUN_DIR NAME` submits one and
prints its id.

The coordinator's provisioner starts this as a process, so that submitting (seconds, on a busy
cluster) holds nobody up and the job does not inherit what Slurm and MPI put into the coordinator's
environment.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from submitit.core.utils import FailedJobError

from rose import config as configuration
from rose.launch import sbatch, state

WAIT_S = 900.0  # for a requeued run; such a job is of no use to anybody else
COMMAND_DEADLINE_S = 60.0


@dataclass
class Lend:
    """What the job runs, at its start and after each requeue."""

    run_dir: Path

    def __call__(self) -> int:
        from rose.serving.lender import Lender

        return Lender(self.run_dir, [f"serving.wait_s={WAIT_S:g}"], self._wanted).run()

    def _wanted(self) -> bool:
        """Whether the training job lives. One that Slurm killed in the midst of its end could not
        cancel this one."""
        if shutil.which("squeue") is None:
            return True  # a container without Slurm's commands: serving.wait_s ends this job
        try:
            job = state.submitted(self.run_dir)
            return job is None or state.is_active(job)
        except RuntimeError:
            return True  # Slurm doesn't answer now


def note(run_dir: Path, jobs: dict[str, str]) -> None:
    """Remember the run's jobs, request -> id, for its next attempt and its end."""
    path = _path(run_dir)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(jobs) + "\n")
    part.replace(path)


def noted(run_dir: Path) -> dict[str, str]:
    path = _path(run_dir)
    return json.loads(path.read_text()) if path.exists() else {}


def cancel_all(run_dir: Path) -> None:
    """The run is over: give back what it asked for. Says what Slurm refuses."""
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


def main() -> int:
    run_dir, name = Path(sys.argv[1]).resolve(), sys.argv[2]
    from rose.launch.slurm import Executor

    text = sbatch.lend_script(configuration.load(run_dir / "config.json"), run_dir, name)
    try:
        print(Executor(sbatch.folder(run_dir), text).submit(Lend(run_dir)).job_id)
    except FailedJobError as error:
        print(str(error).strip(), file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
