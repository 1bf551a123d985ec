"""An environment host's rank: keeps the host's process (process.py) running and forwards its
messages undecoded. An MPI job can't lose a rank, but the host's process may die at any time.

When the process dies, the rank kills its descendants, restarts it and reports the loss to the
coordinator. The coordinator restarts the lost trajectories, or ends the run after too many deaths.
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
from rose.agent.blocked import SIGNAL
from rose.agent.process import FRAME_BYTES, RANK_BYTES, READ_BYTES
from rose.comm import frames, mpi_process
from rose.comm.mailbox import Mailbox
from rose.comm.tasks import Tasks
from rose.comm.wire import COORDINATOR, decode, encode
from rose.config import Config
from rose.launch import logs
from rose.launch.layout import Rank

# Seconds for killed processes to end. Those of another user, or in an uninterruptible sleep in the
# kernel, may survive.
END_S = 10.0
ALONE_S = 2.0  # seconds for a dead process's descendants to exit without a signal
CLOSE_S = 10.0  # seconds to shut down, besides the environments' step_timeout_s
TAIL_LINES = 15  # last lines of the process's log in the report of its death
PAUSE_S = 0.05  # seconds between two polls for descendants
# After SILENT_S seconds without a beat, or after the shortest step_timeout_s if that is less, the
# rank signals the process to report the blocking method. It repeats the signal every ASK_S. Native
# code may ignore the signal, and a method may catch its exception. So a process is killed once it
# has been silent for the longest step_timeout_s plus END_SILENT_S.
SILENT_S, ASK_S, END_SILENT_S = 30.0, 5.0, 60.0
WATCH_S = 1.0  # seconds between two checks for a missing beat


class HostFailed(RuntimeError):
    """The host's process failed with this error. A restart would not help."""


class _Process:
    """The host's process and the socket to it."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self._process, self._reader, self._writer = process, reader, writer
        self.silent_s: float | None = None  # seconds since the last beat; None before the first

    @classmethod
    async def start(cls, run_dir: Path, attempt: int, rank: int, mpi: dict[str, str]) -> _Process:
        """Start the process of this rank. `mpi`: further variables (cluster.mpi.env)."""
        ours, theirs = socket.socketpair()
        here = os.getpid()
        command = [sys.executable, "-m", "rose.agent.process", "--run", str(run_dir)]
        command += ["--attempt", str(attempt), "--rank", str(rank)]
        command += ["--channel", str(theirs.fileno())]
        with theirs:
            process = await asyncio.create_subprocess_exec(
                *command,
                pass_fds=(theirs.fileno(),),
                env=mpi_process.environment(mpi),
                stdin=asyncio.subprocess.DEVNULL,
                start_new_session=True,
                preexec_fn=lambda: processes.die_with_parent(here),
            )
        return cls(process, *await asyncio.open_connection(sock=ours, limit=READ_BYTES))

    def send(self, message: p.Message) -> None:
        """Send a message, or drop it if the process is dead."""
        if not self._writer.is_closing():
            self._writer.write(frames.frame(encode(message)))

    async def pass_on(self, mailbox: Mailbox) -> None:
        """Forward messages to their ranks until the socket is closed. Messages to this rank are
        beats and `RankFailed`. Raises `HostFailed`."""
        with suppress(asyncio.IncompleteReadError, OSError):
            while True:
                data = memoryview(await frames.read(self._reader, FRAME_BYTES))
                rank = int.from_bytes(data[:RANK_BYTES], "little")
                if rank != mailbox.rank:
                    mailbox.forward(rank, data[RANK_BYTES:])
                    continue
                if isinstance(message := decode(data[RANK_BYTES:]), p.RankFailed):
                    raise HostFailed(message.error)
                self.silent_s = 0.0

    def signal(self, number: int) -> None:
        """Send a signal with `os.kill`. asyncio's own methods would poll the process first, and
        could take its exit code before `wait` gets it."""
        if self._process.returncode is None:
            with suppress(ProcessLookupError):
                os.kill(self._process.pid, number)

    async def wait(self) -> str:
        """Wait until the process has exited, then end its descendants. Return how it ended."""
        code = await self._process.wait()
        self._writer.close()
        await asyncio.to_thread(_end_descendants)
        return (
            f"killed by {processes.signal_name(-code)}" if code < 0 else f"ended with code {code}"
        )


class HostRank:
    """Keeps the host's process running and forwards messages in both directions."""

    def __init__(
        self, config: Config, run_dir: Path, attempt: int, me: Rank, mailbox: Mailbox
    ) -> None:
        self._config, self._run_dir, self._attempt = config, Path(run_dir), attempt
        self._me, self._mailbox = me, mailbox
        self._process: _Process | None = None
        self._lost = 0  # deaths of the process that the coordinator hasn't acknowledged yet
        self._ends = asyncio.Event()  # set once the coordinator has sent `Shutdown`

    async def run(self) -> None:
        """Run the host's process until the coordinator sends `Shutdown`. Raises `HostFailed`."""
        processes.adopt_orphans()
        tasks = Tasks()
        self._process = await self._start()
        tasks.spawn(self._receive())
        tasks.spawn(self._watch())
        try:
            await tasks.run_until(self._keep_running())
        finally:
            self._process.signal(signal.SIGKILL)
            await self._process.wait()
            await tasks.close(CLOSE_S)

    async def _start(self) -> _Process:
        mpi = self._config.cluster.mpi.env
        return await _Process.start(self._run_dir, self._attempt, self._me.rank, mpi)

    async def _keep_running(self) -> None:
        """Forward the process's messages. Restart it and report each death until `Shutdown`."""
        while True:
            await self._process.pass_on(self._mailbox)
            if not self._ends.is_set():
                self._process.signal(signal.SIGKILL)  # a process without its socket is useless
            how = await self._process.wait()
            if self._ends.is_set():
                return
            if (silent_s := self._process.silent_s or 0.0) > END_SILENT_S:
                how = f"did not answer for {silent_s:.0f} s and was {how}"
            self._process = await self._start()
            log = logs.rank_log(self._run_dir, self._attempt, self._me.role, self._me.rank)
            last_lines = "\n".join(f"  {line}" for line in logs.tail(log, TAIL_LINES))
            self._lost += 1
            self._mailbox.send(
                COORDINATOR, p.HostLost(self._me.rank, f"{how}; last lines of {log}:\n{last_lines}")
            )

    async def _watch(self) -> None:
        """Let a process without beats report what blocks it. Kill it if it stays silent."""
        limits = [env.step_timeout_s for _, env in self._config.environments.values()]
        ask_at, first = 0.0, min(SILENT_S, *limits)
        while not self._ends.is_set():
            await asyncio.sleep(WATCH_S)
            process = self._process
            if process.silent_s is None:
                continue
            # Count checks: a clock would go on while both the rank and its process are suspended.
            process.silent_s += WATCH_S
            if process.silent_s <= first:
                ask_at = first
            elif process.silent_s > (end_s := max(limits) + END_SILENT_S):
                # On SIGABRT, faulthandler logs each thread's stack; SIGKILL follows END_S later.
                aborts = process.silent_s <= end_s + END_S
                process.signal(signal.SIGABRT if aborts else signal.SIGKILL)
            elif process.silent_s >= ask_at:
                ask_at = process.silent_s + ASK_S
                process.signal(SIGNAL)

    async def _receive(self) -> None:
        """Forward the coordinator's messages. Drop messages that were sent to a dead process."""
        while True:
            _, message = await self._mailbox.receive()
            if isinstance(message, p.HostForgotten):
                self._lost -= 1
            elif isinstance(message, p.Shutdown):
                self._ends.set()
                self._process.send(message)
                await asyncio.sleep(self._config.step_timeout_s + CLOSE_S)
                self._process.signal(signal.SIGKILL)
            elif not self._lost:
                self._process.send(message)


def _end_descendants() -> None:
    """Wait `ALONE_S` for a dead process's descendants to exit, then kill them. Print those that
    survive. The rank has adopted them (`processes.adopt_orphans`) and has no other descendants."""
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
