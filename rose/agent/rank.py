"""An environment host's rank: keeps the host's process (process.py) alive and passes its messages
on, undecoded. MPI can't lose a rank of the world; the process may die at any instruction.

What it leaves behind ends, it is started again, and the coordinator, which is told, starts the lost
trajectories again on the hosts that are up. It also judges when too many have died.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil

from rose import processes
from rose import protocol as p
from rose.agent.process import FRAME_BYTES, RANK_BYTES, READ_BYTES
from rose.comm import frames, mpi_process
from rose.comm.mailbox import Mailbox
from rose.comm.tasks import Tasks
from rose.comm.wire import COORDINATOR, decode, encode
from rose.config import Config
from rose.launch import logs
from rose.launch.layout import Rank

END_S = 10.0  # for what is killed then; a sleep in the kernel, or another user's, may outlast it
ALONE_S = 2.0  # for what a dead process has started to end by itself, as a sandbox's keeper does
CLOSE_S = 10.0  # beyond the environments' own deadline
TAIL_LINES = 15
PAUSE_S = 0.05


class HostFailed(RuntimeError):
    """The process raised, in its own words: starting it again would not help."""


class _Process:
    """The host's process and the way to it."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self._process, self._reader, self._writer = process, reader, writer

    @classmethod
    async def start(cls, run_dir: Path, attempt: int, rank: int, mpi: dict[str, str]) -> _Process:
        ours, theirs = socket.socketpair()
        here = os.getpid()
        command = [sys.executable, "-m", "rose.agent.process", "--run", str(run_dir)]
        command += ["--attempt", str(attempt), "--rank", str(rank)]
        with theirs:
            process = await asyncio.create_subprocess_exec(
                *command,
                "--channel",
                str(theirs.fileno()),
                pass_fds=(theirs.fileno(),),
                env=mpi_process.environment(mpi),
                stdin=asyncio.subprocess.DEVNULL,
                start_new_session=True,
                preexec_fn=lambda: processes.die_with_parent(here),
            )
        return cls(process, *await asyncio.open_connection(sock=ours, limit=READ_BYTES))

    def send(self, message: p.Message) -> None:
        """What is for a dead one goes nowhere."""
        if not self._writer.is_closing():
            self._writer.write(frames.frame(encode(message)))

    async def pass_on(self, mailbox: Mailbox) -> None:
        """Its messages, to the ranks that they are for, while it lives. Raises `HostFailed`."""
        with suppress(asyncio.IncompleteReadError, OSError):
            while True:
                data = memoryview(await frames.read(self._reader, FRAME_BYTES))
                rank = int.from_bytes(data[:RANK_BYTES], "little")
                if rank == mailbox.rank:
                    raise HostFailed(decode(data[RANK_BYTES:]).error)
                mailbox.forward(rank, data[RANK_BYTES:])

    async def end(self) -> str:
        """Wait for it and for all that it has started to be gone; how it ended."""
        code = await self._process.wait()
        self._writer.close()
        await asyncio.to_thread(_end_descendants)
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"

    def kill(self) -> None:
        """By the system call: asyncio's kill polls first, and may take the exit code from who waits
        for it."""
        if self._process.returncode is None:
            with suppress(ProcessLookupError):
                os.kill(self._process.pid, signal.SIGKILL)


class HostRank:
    def __init__(
        self, config: Config, run_dir: Path, attempt: int, me: Rank, mailbox: Mailbox
    ) -> None:
        self._config, self._run_dir, self._attempt = config, Path(run_dir), attempt
        self._me, self._mailbox = me, mailbox
        self._process: _Process | None = None
        self._lost = 0  # deaths that the coordinator hasn't answered to
        self._ends = asyncio.Event()  # the process was told to

    async def run(self) -> None:
        """Until the coordinator sends `Shutdown`. Raises `HostFailed`."""
        processes.adopt_orphans()
        tasks = Tasks()
        self._process = await self._start()
        tasks.spawn(self._receive())
        try:
            await tasks.run_until(self._keep())
        finally:
            self._process.kill()
            await self._process.end()
            await tasks.close(CLOSE_S)

    async def _start(self) -> _Process:
        mpi = self._config.cluster.mpi.env
        return await _Process.start(self._run_dir, self._attempt, self._me.rank, mpi)

    async def _keep(self) -> None:
        while True:
            await self._process.pass_on(self._mailbox)
            if not self._ends.is_set():
                self._process.kill()  # one that has closed its channel is of no more use
            how = await self._process.end()
            if self._ends.is_set():
                return
            self._process = await self._start()
            log = logs.rank_log(self._run_dir, self._attempt, self._me.role, self._me.rank)
            words = "\n".join(f"  {line}" for line in logs.tail(log, TAIL_LINES))
            self._lost += 1
            self._mailbox.send(
                COORDINATOR, p.HostLost(self._me.rank, f"{how}; last lines of {log}:\n{words}")
            )

    async def _receive(self) -> None:
        while True:
            _, message = await self._mailbox.receive()
            if isinstance(message, p.HostForgotten):
                self._lost -= 1
            elif isinstance(message, p.Shutdown):
                self._ends.set()
                self._process.send(message)
                await asyncio.sleep(self._config.step_timeout_s + CLOSE_S)
                self._process.kill()
            elif not self._lost:
                self._process.send(message)


def _end_descendants() -> None:
    """Wait for what the process has left behind, then kill it, and go on without what stays.
    Orphans are this process's by now (`processes.adopt_orphans`), which has no other children."""
    until = time.monotonic() + ALONE_S
    while left := psutil.Process().children(recursive=True):
        for process in left:
            with suppress(ChildProcessError):
                os.waitpid(process.pid, os.WNOHANG)
            if time.monotonic() > until:
                with suppress(psutil.Error):
                    process.kill()
        if time.monotonic() > until + END_S:
            pids = ", ".join(str(process.pid) for process in left)
            print(f"processes {pids} of a dead environment host can't be ended", flush=True)
            return
        time.sleep(PAUSE_S)
