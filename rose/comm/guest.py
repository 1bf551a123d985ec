"""The connection to one borrowed rank: a porter process (`rose.comm.porter`) and a socket to it."""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
import time
from collections.abc import Sequence

from rose import processes, scratch
from rose.comm import frames, mpi_process
from rose.comm.frames import frame
from rose.comm.link import MAX_BYTES
from rose.comm.wire import WireError, decode, encode
from rose.protocol import Message

# Seconds for each of three steps: the porter connects to the socket, it reports its MPI port, and
# the rank connects to the port.
START_S = 30.0
SOCKET_BYTES = 24  # most bytes that our socket's path adds to TMPDIR


class GuestGone(RuntimeError):
    """The porter has ended, because its rank died or never connected."""


class Guest:
    """A borrowed rank, as the coordinator reaches it through its porter."""

    def __init__(
        self,
        porter: asyncio.subprocess.Process,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        port: str,
    ) -> None:
        self._porter, self.reader, self.writer = porter, reader, writer
        self.port = port  # the MPI port to which the rank connects
        self.last_seen = time.monotonic()
        self._closing = False

    @classmethod
    async def open(cls, launcher: Sequence[str], mpi_env: dict[str, str]) -> Guest:
        """Start a porter by `launcher` (mpiexec -n 1). Raises `GuestGone` if it takes too long, and
        OSError if this machine can't start it."""
        here = os.getpid()
        connected = asyncio.get_running_loop().create_future()  # (StreamReader, StreamWriter)
        place = scratch.of_sockets(SOCKET_BYTES)
        with tempfile.TemporaryDirectory(prefix="rose-porter-", dir=place) as folder:  # mode 0700
            path = f"{folder}/s"
            server = await asyncio.start_unix_server(
                lambda *ends: connected.done() or connected.set_result(ends), path
            )
            try:
                porter = await asyncio.create_subprocess_exec(
                    *launcher,
                    sys.executable,
                    "-m",
                    "rose.comm.porter",
                    path,
                    env=mpi_process.environment(mpi_env),
                    stdin=asyncio.subprocess.DEVNULL,
                    preexec_fn=lambda: processes.die_with_parent(here),
                )
                async with asyncio.timeout(START_S):
                    reader, writer = await connected
                guest = cls(porter, reader, writer, "")
                async with asyncio.timeout(START_S):
                    guest.port = (await guest._read_frame()).decode()
            except (TimeoutError, GuestGone):
                if porter.returncode is None:
                    porter.kill()
                raise GuestGone(
                    f"its porter ({' '.join(launcher)}) was not up within {START_S:g} s; see the "
                    "coordinator's log"
                ) from None
            finally:
                server.close()
        return guest

    async def accept(self) -> None:
        """Let the porter accept the rank's connection. Raises `GuestGone` if none comes."""
        self.writer.write(frame(b""))
        try:
            async with asyncio.timeout(START_S):
                await self._read_frame()
        except TimeoutError:
            raise GuestGone(f"did not finish connecting within {START_S:g} s") from None
        self.last_seen = time.monotonic()

    async def receive(self) -> Message | WireError:
        """Return the rank's next message, or the error if it is malformed. Raises `GuestGone`."""
        data = await self._read_frame()
        self.last_seen = time.monotonic()
        try:
            return decode(data)
        except WireError as error:
            return error

    def send(self, message: Message) -> None:
        """Queue a message and return at once. If the rank is gone, drop the message."""
        if not self._closing and not self.writer.is_closing():
            self.writer.write(frame(encode(message)))

    async def close(self, deadline_s: float = 1.0) -> None:
        """Send the queued messages, then end the porter."""
        if self._closing:
            return
        self._closing = True
        try:
            async with asyncio.timeout(deadline_s):
                await self.writer.drain()
            self.writer.write_eof()
            async with asyncio.timeout(deadline_s):
                await self._porter.wait()
        except (TimeoutError, OSError):
            pass  # a porter that hangs, killed below, or is gone
        finally:
            self.writer.close()  # the end of the socket, at which a porter ends
            if self._porter.returncode is None:
                self._porter.kill()

    async def _read_frame(self) -> bytes:
        try:
            return await frames.read(self.reader, MAX_BYTES)
        except frames.FrameError as error:
            raise GuestGone(f"its porter sends no frames: {error}") from None
        except (asyncio.IncompleteReadError, OSError):
            raise GuestGone("its connection broke") from None
