"""Slurm jobs that compute rewards for a run. `python -m rose.parts.rewards.job RUN_DIR NAME`
submits one and prints its id; NAME is reward-POOL-NUMBER.

A job has a worker (worker.py) for each of its CPUs, which connects to the pool. The job ends when
the pool needs none of its workers any more, or when they find no pool.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from rose import config as configuration
from rose.comm import mpi_process
from rose.config import cpus_of
from rose.launch import batch, sbatch, slurm
from rose.parts.rewards import messages

# Most restarts of a job's failed workers, for each of its workers, which share them. So a job whose
# workers can't start ends.
STARTS = 20
POLL_S = 0.2  # seconds between two polls of the workers
KILL_S = 5.0  # longest wait for workers to end after Slurm's signal to the job


@dataclass
class Help:
    """The job's program, which runs at its start and after each requeue."""

    run_dir: Path
    pool: int

    def __call__(self) -> str:
        """Run workers until the pool needs none, or Slurm signals the job. Return the reason."""
        batch.remember()
        c = configuration.load(self.run_dir / "config.json")
        with tempfile.TemporaryDirectory(
            prefix="rose-reward-", ignore_cleanup_errors=True
        ) as scratch:
            workers = [self._start(scratch) for _ in range(cpus_of(c.cluster, "reward", c.rollout))]
            starts = len(workers) * STARTS
            while workers:
                if batch.received:
                    return self._end(workers)
                for worker in list(workers):
                    code = worker.poll()
                    if code is not None:
                        workers.remove(worker)
                    if code and starts:
                        starts -= 1
                        workers.append(self._start(scratch))
                time.sleep(POLL_S)
        return "not needed any more"

    def _start(self, scratch: str) -> subprocess.Popen:
        pool = messages.folder(self.run_dir, self.pool) / "pool.json"
        return subprocess.Popen(
            [sys.executable, "-u", "-m", "rose.parts.rewards.worker", "--run", str(self.run_dir)]
            + ["--pool", str(pool)],
            env=mpi_process.environment({"OMP_NUM_THREADS": "1", "TMPDIR": scratch}),
            stdin=subprocess.DEVNULL,
        )

    def _end(self, workers: list[subprocess.Popen]) -> str:
        """Stop the workers, as Slurm ends the job. The pool gives other workers their answers."""
        for worker in workers:
            worker.terminate()
        end = time.monotonic() + KILL_S
        while any(worker.poll() is None for worker in workers) and time.monotonic() < end:
            time.sleep(0.02)
        return f"ended by {signal.Signals(batch.received[0]).name}"


def main() -> int:
    run_dir, name = Path(sys.argv[1]).resolve(), sys.argv[2]
    config = configuration.load(run_dir / "config.json")
    text = sbatch.helper_script(config, "reward", 0, run_dir, name)
    return slurm.submit_helper(run_dir, text, Help(run_dir, int(name.split("-")[1])))


if __name__ == "__main__":
    sys.exit(main())
