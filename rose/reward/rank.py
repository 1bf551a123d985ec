"""A reward rank: takes episodes that have ended from the environment hosts, and answers with their
scores, which the workers of its pool compute."""

from __future__ import annotations

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
from rose.config import Config
from rose.files import Lossy
from rose.observe.recorder import NullRecorder
from rose.reward import scorers
from rose.reward.episode import ScoringFailed
from rose.reward.pool import Pool

CLOSE_S = 5.0
SCRATCH = "rose-reward-"  # in the node's temporary folder, before the rank's pid


def start_worker(run_dir: Path, folder: Path, digest: str, number: int, address: str, token: Path):
    """A worker on this host, in a process of its own that ends with this one. Its words go to
    worker-NUMBER.log in `folder`; `digest` as `scorers.digest` had it."""
    command = [sys.executable, "-m", "rose.reward.worker", "--run", str(run_dir)]
    command += ["--pool", address, "--token", str(token), "--number", str(number)]
    command += ["--digest", digest]
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
    own.mkdir(mode=0o700, exist_ok=True)
    return own


class RewardRank:
    """`index`: which of its role."""

    def __init__(
        self, config: Config, run_dir: Path, index: int, mailbox: Mailbox, recorder: NullRecorder
    ) -> None:
        self._folder = Path(run_dir).resolve() / "rewards" / f"pool-{index}"
        self._settings, self._run_dir = config.reward, Path(run_dir).resolve()
        self._mailbox, self._recorder = mailbox, recorder

    async def run(self) -> None:
        """Until the coordinator says `Shutdown`."""
        self._folder.mkdir(parents=True, exist_ok=True)
        tasks = Tasks()
        digest = scorers.digest(self._settings.args)
        start = functools.partial(start_worker, self._run_dir, self._folder, digest)
        self._pool, self._spawn = (
            Pool(self._settings, self._folder, start, tasks.spawn),
            tasks.spawn,
        )
        try:
            await self._pool.open()
            await tasks.run_until(self._receive())
        finally:
            await self._pool.close()
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
                asked.id, score.reward, score.success, score.timed_out, found.queue_s, found.seconds
            ),
        )
