"""The rollout rank of an engine with a replica, which has the device while the engine sleeps.

The replica is a process of its own (rose/parts/replicas/process.py), because MPI can't lose a rank
and a replica may die at any time. The rank starts it once the engine is up. A replica that dies is
started again `rollout.engine_restarts` times; after that the run continues without it.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from rose import processes
from rose import protocol as p
from rose.comm import frames, mpi_process
from rose.comm.wire import decode, encode
from rose.config import Config, check_model, read_shape
from rose.engine.activation import NOTHING, Moved
from rose.engine.rank import RolloutWorker
from rose.parts.replicas.process import FRAME_BYTES

READ_BYTES = 2**20  # buffer limit of the channel from the replica


def build(run_dir: Path, index: int, config: Config, *arguments: Any) -> RolloutWorker | None:
    """Return the worker of the rollout rank with this index; None if it has no replica."""
    return ReplicaWorker(run_dir, config, *arguments) if index < config.elastic_replicas else None


class ReplicaWorker(RolloutWorker):
    """`run_dir` is the run's folder; `arguments` are those of a `RolloutWorker`."""

    def __init__(self, run_dir: Path, config: Config, name: str, *arguments: Any) -> None:
        super().__init__(config, name, *arguments)
        self._replica = Replica(config, run_dir, self.folder, name, self._send)
        # On a GPU engine and replica hold the device's memory alternately.
        self._alternates = self._start_cancellable = config.cluster.gpus > 0

    def _services(self) -> list[Coroutine]:
        return [*super()._services(), self._keep_replica()]

    async def _keep_replica(self) -> None:
        await self._up.wait()
        await self._replica.keep()
        await asyncio.Event().wait()  # the rank continues without a replica

    async def _sleep(self) -> Moved:
        """Put the engine to sleep. An engine that fails to is shut down, so that the replica gets
        the device. Another one is started when this one would have to wake."""
        try:
            return await super()._sleep()
        except Exception:
            print(f"{self.name}: {traceback.format_exc()}", flush=True)
            await self.engine.shutdown()
            return NOTHING

    async def _wake(self) -> Moved:
        await self._replica.leave_device()
        return await super()._wake()

    def _handle(self, message: p.Message) -> None:
        match message:
            case p.ComputeGradient():
                self._order(message)
            case p.TrainStep() | p.TrainPart():
                self._replica.order(message)
            case p.StopReplica():
                self._replica.stop()
            case _:
                super()._handle(message)

    async def _load(self, m: p.LoadVersion) -> None:
        await super()._load(m)
        # The replica loads the version afterwards, because the step waits only for the engine.
        if self.engine.version == m.version:
            self._order(m)

    def _order(self, message: p.LoadVersion | p.ComputeGradient) -> None:
        here = self._store(message.store)
        self._replica.order(msgspec.structs.replace(message, store=here))


class Replica:
    """Starts, orders and kills the replica's process. `model` is the model's folder, and `send`
    sends to the coordinator. Raises `ConfigError` for a model that can't have replicas."""

    def __init__(
        self,
        config: Config,
        run_dir: Path,
        model: Path,
        worker: str,
        send: Callable[[p.Message], None],
    ) -> None:
        check_model(config, read_shape(model))  # the launcher may not have known the model's shape
        self._config, self._worker, self._send = config, worker, send
        self._arguments = ["--config", str(run_dir / "config.json"), "--model", str(model)]
        self._process: asyncio.subprocess.Process | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._ready = False
        self._computes = False  # true from an order to compute a gradient to its result
        self._stopped = False
        self._gone = asyncio.Event()  # set when the replica's process has ended

    async def keep(self) -> None:
        """Run a replica, and restart it when it dies. Returns after `stop`, or when the last
        allowed restart has died."""
        for restarts_left in range(self._config.rollout.engine_restarts, -1, -1):
            reader = await self._start()
            try:
                if self._stopped:
                    return
                why = await self._pass_on(reader)
            finally:
                self._kill()
                code = await asyncio.shield(self._process.wait())
                self._writer.close()
                self._ready = self._computes = False
                self._gone.set()
            if self._stopped:
                return
            how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"
            self._send(p.ReplicaLost(self._worker, why or how, restarts_left > 0))

    def order(self, message: p.LoadVersion | p.ComputeGradient | p.TrainStep | p.TrainPart) -> None:
        """Send `message` to the replica. A message to a dead replica is dropped: `ReplicaLost`
        reports the death to the coordinator."""
        if self._ready and not self._writer.is_closing():
            self._computes |= isinstance(message, p.ComputeGradient)
            self._writer.write(frames.frame(encode(message)))

    def stop(self) -> None:
        """Kill the replica and start no other. Sends no message, as the coordinator ordered it."""
        self._stopped = True
        if self._process is not None:
            self._kill()

    async def leave_device(self) -> None:
        """Kill the replica if it is still computing, and wait for its end. The step no longer takes
        its sum of gradients, because the engine is to wake."""
        if self._computes:
            self._gone.clear()
            self._kill()
            await self._gone.wait()

    async def _start(self) -> asyncio.StreamReader:
        ours, theirs = socket.socketpair()
        here = os.getpid()
        command = [sys.executable, "-m", "rose.parts.replicas.process"]
        command += [*self._arguments, "--worker", self._worker]
        with theirs:
            self._process = await asyncio.create_subprocess_exec(
                *command,
                "--channel",
                str(theirs.fileno()),
                pass_fds=(theirs.fileno(),),
                env=mpi_process.environment(self._config.cluster.mpi.env),
                stdin=asyncio.subprocess.DEVNULL,
                start_new_session=True,
                preexec_fn=lambda: processes.die_with_parent(here),
            )
        reader, self._writer = await asyncio.open_connection(sock=ours, limit=READ_BYTES)
        return reader

    async def _pass_on(self, reader: asyncio.StreamReader) -> str:
        """Pass the replica's messages to the coordinator until its channel closes. Returns the
        error that the replica reported, or ""."""
        with suppress(asyncio.IncompleteReadError, OSError):
            while True:
                match decode(await frames.read(reader, FRAME_BYTES)):
                    case p.RankFailed(error=error):
                        return error
                    case p.GradientComputed() as message:
                        self._computes = False
                        self._send(message)
                    case message:
                        self._ready = True
                        self._send(message)
        return ""

    def _kill(self) -> None:
        """Kill the process by a system call. asyncio's `kill` polls the process first, and may take
        the exit code from `keep`, which waits for it."""
        if self._process.returncode is None:
            with suppress(ProcessLookupError):
                os.kill(self._process.pid, signal.SIGKILL)
