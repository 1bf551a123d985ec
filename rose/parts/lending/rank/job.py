"""Slurm jobs that lend a run one more engine.

`python -m rose.parts.lending.rank.job RUN_DIR NAME` submits a job and prints its id. The
coordinator's provisioner runs it as a separate process, for two reasons. Submitting takes seconds
on a busy cluster and must not block the coordinator. And the job must not inherit the variables
that Slurm and MPI set in the coordinator's environment.
"""

from __future__ import annotations

import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from rose import config as configuration
from rose.launch import batch, sbatch, slurm, state
from rose.parts.lending.rank.lender import Lender

# Seconds that the job waits for a requeued run: a short time, because no other run can use the job.
WAIT_S = 900.0


@dataclass
class Lend:
    """The function that the job runs, at its start and after each requeue."""

    run_dir: Path

    def __call__(self) -> int:
        lender = Lender(self.run_dir, [f"serving.wait_s={WAIT_S:g}"], self._wanted)
        lender.signals = batch.received
        return lender.run()

    def _wanted(self) -> bool:
        """True if the training job is pending or running, or if that is unknown. The training job
        normally cancels this job at its end, but it can't if Slurm kills it."""
        if shutil.which("squeue") is None:
            return True  # unknown in a container without Slurm; serving.wait_s ends this job
        try:
            job = state.submitted(self.run_dir)
            return job is None or state.is_active(job)
        except RuntimeError:
            return True  # unknown, because Slurm doesn't answer


def main() -> int:
    run_dir, name = Path(sys.argv[1]).resolve(), sys.argv[2]
    c = configuration.load(run_dir / "config.json")
    text = sbatch.helper_script(c, "borrowed", c.rollout.tensor_parallel, run_dir, name)
    return slurm.submit_helper(run_dir, text, Lend(run_dir))


if __name__ == "__main__":
    sys.exit(main())
