"""A reward rank: takes episodes that have ended from the environment hosts, and answers with their
scores, which the workers of its pool compute."""

from __future__ import annotations

import asyncio
import functools
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil

from rose import protocol as p
from rose.comm import mpi_process
from rose.comm.mailbox import Mailbox
from rose.comm.tasks import Tasks
from rose.comm.wire import COORDINATOR
from rose.config import Config
from rose.files import Lossy, own_folder
from rose.observe.recorder import NullRecorder
from rose.reward import joiner
from rose.reward.episode import ScoringFailed
from rose.reward.guests import Guests
from rose.reward.pool import Pool

CLOSE_S = 5.0
REPORT_S = 1.0  # between two reports to the coordinator, which may ask Slurm for jobs
SCRATCH = "rose-reward-"  # in the node's temporary folder, before the rank's pid


def start_worker(run_dir: Path, folder: Path, number: int, address: str, token: Path):
    """A worker on this host, in a process of its own that ends with this one. Its words go to
    worker-NUMBER.log in `folder`."""
    command = [sys.executable, "-m", "rose.reward.worker", "--run", str(run_dir)]
    command += ["--pool", address, "--token", str(token), "--number", str(number)]
    with Lossy(folder / f"worker-{number}.log", "w") as words:
        return subprocess.Popen(
            command,
            env=mpi_process.environment({"OMP_NUM_THREADS": "1", "TMPDIR": str(_scratch())}),
            stdin=subprocess.DEVNULL,
            stdout=words,
            stderr=words,
        )


def _scratch() -> Path:
    """This rank's folder for its workers' temporary files; those of ranks that were killed go."""
    own = Path(tempfile.gettempdir()) / f"{SCRATCH}{os.getpid()}"
    for other in own.parent.glob(f"{SCRATCH}*"):
        pid = other.name.removeprefix(SCRATCH)
        if pid.isdigit() and not psutil.pid_exists(int(pid)):
            shutil.rmtree(other, ignore_errors=True)  # another user's stays
    own_folder(own)
    return own


class RewardRank:
    """`index`: which of its role."""

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
        self._folder = joiner.folder(self._run_dir, index)
        self._config, self._attempt, self._index = config, attempt, index
        self._mailbox, self._recorder = mailbox, recorder

    async def run(self) -> None:
        """Until the coordinator says `Shutdown`."""
        self._folder.mkdir(parents=True, exist_ok=True)
        tasks = Tasks()
        start = functools.partial(start_worker, self._run_dir, self._folder)
        reward, self._spawn = self._config.reward, tasks.spawn
        self._pool = Pool(reward, self._folder, start, tasks.spawn)
        guests = None
        try:
            await self._pool.open()
            if reward.max_jobs:
                guests = Guests(self._config, self._folder, self._attempt, self._pool, tasks.spawn)
                tasks.spawn(guests.run())
                tasks.spawn(self._report())
            await tasks.run_until(self._receive())
        finally:
            await self._pool.close()
            if guests is not None:
                await guests.close()
            await tasks.close(CLOSE_S)
            shutil.rmtree(_scratch(), ignore_errors=True)

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
        """What waits, for as long as anything does, and once when nothing does any more."""
        last = None
        while True:
            await asyncio.sleep(REPORT_S)
            waiting, waited_s = self._pool.unmet()
            demand = p.RewardDemand(self._index, waiting, waited_s, self._pool.joined)
            if waiting or demand != last:
                self._mailbox.send(COORDINATOR, demand)
            last = demand

    async def _score(self, host: int, asked: p.ScoreTrajectory) -> None:
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
