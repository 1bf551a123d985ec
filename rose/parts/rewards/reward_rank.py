"""A reward rank: it receives finished episodes from the environment hosts and answers with their
scores, which the workers of its pool compute."""

from __future__ import annotations

import asyncio
import functools
import shutil
import subprocess
import sys
from pathlib import Path

from rose import protocol as p
from rose import scratch
from rose.comm import mpi_process
from rose.comm.address import addresses_of
from rose.comm.mailbox import Mailbox
from rose.comm.tasks import Tasks
from rose.comm.wire import COORDINATOR
from rose.config import Config
from rose.files import Lossy
from rose.observe.recorder import NullRecorder
from rose.parts.rewards import messages
from rose.parts.rewards.pool import Pool
from rose.reward.episode import ScoringFailed

CLOSE_S = 5.0  # longest wait for the rank's tasks at its end
REPORT_S = 1.0  # seconds between two reports to the coordinator, which may submit Slurm jobs
SCRATCH = "rose-reward-"  # kind of the rank's folder for its workers' temporary files


def start_worker(run_dir: Path, folder: Path, number: int, pool: Path):
    """Start a worker on this host, in a process that ends with this one. Its output goes to
    worker-NUMBER.log in `folder`."""
    command = [sys.executable, "-m", "rose.parts.rewards.worker", "--run", str(run_dir)]
    command += ["--pool", str(pool), "--number", str(number)]
    with Lossy(folder / f"worker-{number}.log", "w") as log:
        return subprocess.Popen(
            command,
            env=mpi_process.environment(
                {"OMP_NUM_THREADS": "1", "TMPDIR": str(scratch.folder(SCRATCH))}
            ),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )


class RewardRank:
    """A reward rank. `index`: its number among the reward ranks."""

    def __init__(
        self,
        config: Config,
        run_dir: Path,
        attempt: int,
        index: int,
        mailbox: Mailbox,
        recorder: NullRecorder,
    ) -> None:
        self._run_dir = Path(run_dir).resolve()
        self._folder = messages.folder(self._run_dir, index)
        self._config, self._attempt, self._index = config, attempt, index
        self._mailbox, self._recorder = mailbox, recorder

    async def run(self) -> None:
        """Score episodes until the coordinator sends `Shutdown`."""
        self._folder.mkdir(parents=True, exist_ok=True)
        tasks = Tasks()
        start = functools.partial(start_worker, self._run_dir, self._folder)
        reward, self._spawn = self._config.reward, tasks.spawn
        reachable = addresses_of(self._config.cluster.interface) if reward.max_jobs else []
        addresses = [address for _, address in reachable]
        self._pool = Pool(reward, self._folder, start, tasks.spawn, addresses)
        try:
            await self._pool.open()
            if reward.max_jobs:
                tasks.spawn(self._report())
            await tasks.run_until(self._receive())
        finally:
            await self._pool.close()
            await tasks.close(CLOSE_S)
            shutil.rmtree(scratch.folder(SCRATCH), ignore_errors=True)

    async def _receive(self) -> None:
        while True:
            source, message = await self._mailbox.receive()
            match message:
                case p.ScoreTrajectory():
                    self._spawn(self._score(source, message))
                case p.CancelScore():
                    self._pool.cancel(message.id)
                case p.Shutdown():
                    return
                case _:
                    raise ValueError(f"a reward rank has no use for {type(message).__name__}")

    async def _report(self) -> None:
        """Report the backlog to the coordinator while any score waits, and each time it changes."""
        last = None
        while True:
            await asyncio.sleep(REPORT_S)
            waiting, waited_s = self._pool.unmet()
            demand = p.RewardDemand(self._index, waiting, waited_s, self._pool.joined)
            if waiting or demand != last:
                self._mailbox.send(COORDINATOR, demand)
            last = demand

    async def _score(self, host: int, asked: p.ScoreTrajectory) -> None:
        """Score an episode, and send the score or the error to its environment host."""
        try:
            with self._recorder.timed("score", trajectory=asked.id):
                found = await self._pool.score(asked.id, asked.prompt, asked.episode)
        except ScoringFailed as failed:
            self._mailbox.send(host, p.TrajectoryScored(asked.id, error=str(failed)))
            return
        score = found.score
        self._mailbox.send(
            host,
            p.TrajectoryScored(
                asked.id,
                score.reward,
                score.success,
                score.timed_out,
                found.queue_s,
                found.seconds,
                found.joined,
            ),
        )
