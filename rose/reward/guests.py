"""Reward workers from Slurm jobs, on the pool's side: the pool's door, and a porter for each rank.

Each pool has a door (rose/comm/join.py) in its folder, through which a rank of such a job joins
over MPI. Through its porter (rose/comm/guest.py) it exchanges the same messages with the pool as
the pool's own workers. Left out: the submission of jobs (rose/coordinator/reward_jobs.py), and the
rank's side (joiner.py).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from pathlib import Path

import msgspec

from rose.comm import frames
from rose.comm.guest import Guest, GuestGone
from rose.comm.join import Ask, Door
from rose.config import Config, cpus_of
from rose.launch import local
from rose.reward.messages import AGAIN, BEAT, BEAT_S, STOP
from rose.reward.pool import Pool

POLL_S = 0.1  # seconds between two polls of the door
PATIENCE_S = 30.0  # longest time between a rank's admission and its connection
FAREWELL_S = 0.3  # seconds for the last message to pass the porter


class _Joined:
    """A joined rank, with the interface of a pool's `Process`."""

    def __init__(self, guest: Guest) -> None:
        self.guest = guest

    def poll(self) -> None:
        return None

    def dismiss(self) -> None:
        self.guest.forward(STOP)

    def kill(self) -> None:
        self.guest.forward(AGAIN)


class Guests:
    """The joined ranks of a pool, for one attempt of the run. `folder`: the pool's folder."""

    def __init__(
        self,
        config: Config,
        folder: Path,
        attempt: int,
        pool: Pool,
        spawn: Callable[[Coroutine], asyncio.Task],
    ) -> None:
        cluster = config.cluster
        self._mpi_env = cluster.interface_env | cluster.mpi.env | cluster.mpi.join_env
        self._most = config.reward.max_jobs * cpus_of(cluster, "reward", config.rollout)
        self._door = Door(folder, attempt)
        self._pool, self._spawn = pool, spawn
        # Of each admitted rank, by its id: set when the rank connects.
        self._connecting: dict[str, asyncio.Event] = {}
        self._joined: set[_Joined] = set()

    async def run(self) -> None:
        """Admit ranks until cancelled. Another thread polls the door, whose files may lie on a slow
        file system."""
        await asyncio.to_thread(self._door.open)
        beat_at = time.monotonic()
        try:
            while True:
                await asyncio.sleep(POLL_S)
                asks, connecting = await asyncio.to_thread(self._door.poll)
                for id, ask in asks:
                    await self._decide(id, ask)
                for id in set(connecting) & self._connecting.keys():
                    self._connecting[id].set()
                if time.monotonic() - beat_at > BEAT_S:
                    beat_at = time.monotonic()
                    for joined in self._joined:
                        joined.guest.forward(BEAT)
        finally:
            self._door.close()

    async def _decide(self, id: str, ask: Ask | str) -> None:
        if isinstance(ask, str):
            print(f"join refused: {id}: {ask}", flush=True)
            await asyncio.to_thread(self._door.answer, id, reason=ask)
        elif len(self._connecting) >= self._most:
            why = f"{self._most} reward ranks have joined already (reward.max_jobs)"
            await asyncio.to_thread(self._door.answer, id, reason=why, temporary=True)
        else:
            self._connecting[id] = asyncio.Event()
            self._spawn(self._serve(id, ask))

    async def _serve(self, id: str, ask: Ask) -> None:
        """Serve a rank from its admission to its end. An error ends this rank alone, and the pool
        gives its answers to other workers."""
        guest, who = None, f"process {ask.pid} on {ask.host}, job {ask.job}"
        try:
            guest = await Guest.open([*local.MPIEXEC, "-n", "1"], self._mpi_env)
            await asyncio.to_thread(self._door.answer, id, worker="reward", port=guest.port)
            async with asyncio.timeout(PATIENCE_S):
                await self._connecting[id].wait()
            await guest.accept()
            joined = _Joined(guest)
            self._joined.add(joined)
            print(f"joined: {who}", flush=True)
            try:
                await self._pool.serve_joined(joined, guest.reader, guest.writer)
            finally:
                self._joined.discard(joined)
            print(f"left: {who}", flush=True)
        except GuestGone as error:
            await asyncio.to_thread(self._door.answer, id, reason=str(error), temporary=True)
            print(f"not joined: {who}: {error}", flush=True)
        except (OSError, EOFError, TimeoutError, frames.FrameError, msgspec.DecodeError) as error:
            print(f"not joined: {who}: {error!r}", flush=True)
        finally:
            del self._connecting[id]
            await asyncio.to_thread(self._door.forget, id)
            if guest is not None:
                await asyncio.sleep(FAREWELL_S)
                await guest.close()

    async def close(self) -> None:
        """Wait for the pool's last message to reach the ranks that it has dismissed."""
        if self._joined:
            await asyncio.sleep(FAREWELL_S)
