"""Jobs that compute rewards for a run. `python -m rose.reward.job RUN_DIR NAME` submits one and
prints its id; NAME is reward-POOL-NUMBER.

A job has a rank (joiner.py) for each of its CPUs, which joins that pool. It ends when the pool
needs none of them any more, or there is no run to join for `WAIT_S`.
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

WAIT_S = 60.0
PAUSE_S = 2.0  # between two tries to join
LOOK_S = 0.2
KILL_S = 5.0  # from the job's signal to its ranks' end


@dataclass
class _Seat:
    """Of one rank after the other. Times are monotonic seconds."""

    rank: subprocess.Popen | None = None
    start_at: float = 0.0
    since: float = field(default_factory=time.monotonic)  # no rank of it has joined
    over: bool = False


@dataclass
class Help:
    """What the job runs, at its start and after each requeue."""

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
                    self._look(seat)
            time.sleep(LOOK_S)
        return "not needed any more"

    def _look(self, seat: _Seat) -> None:
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
        if code == Ended.AGAIN or code < 0:  # it had joined, or was killed
            seat.since, seat.start_at = now, now
        seat.over = code in (Ended.DONE, Ended.REFUSED) or now - seat.since > WAIT_S

    def _end(self, ranks: list[subprocess.Popen]) -> str:
        """Slurm ends the job: the pool is told, which gives others what the ranks hold."""
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
