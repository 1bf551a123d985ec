"""Slurm jobs that compute rewards for a run. `python -m rose.reward.job RUN_DIR NAME` submits one
and prints its id; NAME is reward-POOL-NUMBER.

A job has a rank (joiner.py) for each of its CPUs, which joins the pool. The job ends when the pool
needs none of its ranks any more, or when there was no run to join for `WAIT_S`.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from rose import config as configuration
from rose.comm import mpi_process
from rose.config import cpus_of
from rose.launch import batch, sbatch, slurm
from rose.reward.joiner import Ended

WAIT_S = 60.0  # longest time without a run to join, after which the job ends
PAUSE_S = 2.0  # seconds between two attempts to join
POLL_S = 0.2  # seconds between two polls of the ranks
KILL_S = 5.0  # longest wait for ranks to end after Slurm's signal to the job


@dataclass
class _Seat:
    """A CPU of the job, on which ranks run one after the other. Times are monotonic seconds."""

    rank: subprocess.Popen | None = None
    start_at: float = 0.0
    since: float = field(default_factory=time.monotonic)  # time since which no rank has joined
    over: bool = False


@dataclass
class Help:
    """The job's program, which runs at its start and after each requeue."""

    run_dir: Path
    pool: int

    def __call__(self) -> str:
        batch.remember()
        c = configuration.load(self.run_dir / "config.json")
        seats = [_Seat() for _ in range(cpus_of(c.cluster, "reward", c.rollout))]
        while not all(seat.over for seat in seats):
            if batch.received:
                return self._end([seat.rank for seat in seats if seat.rank])
            for seat in seats:
                if not seat.over:
                    self._poll(seat)
            time.sleep(POLL_S)
        return "not needed any more"

    def _poll(self, seat: _Seat) -> None:
        """Start the seat's rank if it is due, and handle the end of one."""
        now = time.monotonic()
        if seat.rank is None and now >= seat.start_at:
            seat.rank = subprocess.Popen(
                [sys.executable, "-u", "-m", "rose.reward.joiner", "--run", str(self.run_dir)]
                + ["--pool", str(self.pool)],
                env=mpi_process.environment({"OMP_NUM_THREADS": "1"}),
                stdin=subprocess.DEVNULL,
            )
        code = seat.rank.poll() if seat.rank else None
        if code is None:
            return
        seat.rank, seat.start_at = None, now + PAUSE_S
        if code == Ended.AGAIN or code < 0:  # the rank had joined, or was killed
            seat.since, seat.start_at = now, now
        seat.over = code in (Ended.DONE, Ended.REFUSED) or now - seat.since > WAIT_S

    def _end(self, ranks: list[subprocess.Popen]) -> str:
        """Stop the ranks, as Slurm ends the job. Each reports it to the pool, which gives its
        answers to other workers."""
        for rank in ranks:
            rank.terminate()
        end = time.monotonic() + KILL_S
        while any(rank.poll() is None for rank in ranks) and time.monotonic() < end:
            time.sleep(0.02)
        return f"ended by {signal.Signals(batch.received[0]).name}"


def main() -> int:
    run_dir, name = Path(sys.argv[1]).resolve(), sys.argv[2]
    config = configuration.load(run_dir / "config.json")
    text = sbatch.helper_script(config, "reward", 0, run_dir, name)
    return slurm.submit_helper(run_dir, text, Help(run_dir, int(name.split("-")[1])))


if __name__ == "__main__":
    sys.exit(main())
