"""Jobs that lend a run one more engine. `python -m rose.lending.rank.job RUN_DIR NAME` submits one
and prints its id.

The coordinator's provisioner starts this as a process, so that submitting (seconds, on a busy
cluster) holds nobody up and the job does not inherit what Slurm and MPI put into the coordinator's
environment.
"""

from __future__ import annotations

import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from rose import config as configuration
from rose.launch import batch, sbatch, slurm, state
from rose.lending.rank.lender import Lender

WAIT_S = 900.0  # for a requeued run; such a job is of no use to anybody else


@dataclass
class Lend:
    """What the job runs, at its start and after each requeue."""

    run_dir: Path

    def __call__(self) -> int:
        lender = Lender(self.run_dir, [f"serving.wait_s={WAIT_S:g}"], self._wanted)
        lender.signals = batch.received
        return lender.run()

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


def main() -> int:
    run_dir, name = Path(sys.argv[1]).resolve(), sys.argv[2]
    text = sbatch.lend_script(configuration.load(run_dir / "config.json"), run_dir, name)
    return slurm.submit_helper(run_dir, text, Lend(run_dir))


if __name__ == "__main__":
    sys.exit(main())
