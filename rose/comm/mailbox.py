"""Exchange messages between ranks by MPI point-to-point calls, from asyncio or from plain loops.

A send never blocks: its buffer is kept until MPI has sent it. Receiving polls, because MPI offers
no file descriptor to wait on. It polls without a pause while messages keep arriving. Then its
pauses grow to `IDLE_PAUSE_S`, so that a waiting rank leaves its core to the engines. A pause costs
an event loop at least a millisecond, so there is none between two messages that have both arrived.
No collective is used after start-up.

Receives are posted in advance and nothing is probed. With MPICH 5.0.2 over "tcp;ofi_rxm", probing
beside the large receives of a broadcast (rose/transfer/broadcast.py) lost data. A message that is
longer than a posted buffer is sent in parts, whose order MPI keeps. A header gives its length.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque

from mpi4py import MPI

from rose.comm.wire import WireError, decode, encode, message_bytes
from rose.protocol import Message, Role

_TAG = 7
_PART_BYTES = 1 << 16  # bytes of a message in one send, and of a posted buffer
_POSTED = 16  # posted receives
# Tests of a receive per poll, 0.4 us each. MPICH (ch4:ofi) doesn't report a message at the test
# that starts receiving it.
_TESTS = 4
_YIELD_EVERY = 16  # messages after which other tasks of the event loop may run
# The first pause, about the latency of a message; a shorter pause would only use CPU time.
FIRST_PAUSE_S = 0.0002
IDLE_PAUSE_S = 0.002  # the longest pause


class Mailbox:
    """The messages that a rank of `comm` sends and receives."""

    def __init__(self, comm: MPI.Comm) -> None:
        self._comm = comm
        self._pause_s = FIRST_PAUSE_S
        self._sending: deque[tuple[MPI.Request, memoryview]] = deque()
        self._receiving: deque[tuple[MPI.Request, bytearray]] = deque()  # MPI fills them in order
        self._parts: dict[int, bytearray] = {}  # incomplete messages, by source rank
        self._status = MPI.Status()
        self._received = 0
        self.rank = comm.Get_rank()
        self.size = comm.Get_size()
        for _ in range(_POSTED):
            self._post_receive(bytearray(_PART_BYTES))

    def _post_receive(self, buffer: bytearray) -> None:
        request = self._comm.Irecv([buffer, MPI.BYTE], source=MPI.ANY_SOURCE, tag=_TAG)
        self._receiving.append((request, buffer))

    def send(self, rank: int, message: Message) -> None:
        """Queue `message` for `rank` and return at once. Raises `WireError` if it is too large."""
        self.forward(rank, encode(message))

    def forward(self, rank: int, message: bytes | memoryview) -> None:
        """Queue an encoded message for `rank`, like `send`."""
        self._drop_completed_sends()
        data = memoryview(message)
        for start in range(0, len(data), _PART_BYTES):
            part = data[start : start + _PART_BYTES]
            self._sending.append((self._comm.Isend([part, MPI.BYTE], dest=rank, tag=_TAG), part))

    def poll(self) -> tuple[int, Message] | None:
        """Return (source rank, message) of the next whole message; None if none has arrived. Raises
        `WireError` for invalid bytes."""
        self._drop_completed_sends()
        while any(self._receiving[0][0].Test(self._status) for _ in range(_TESTS)):
            source, (_, buffer) = self._status.Get_source(), self._receiving.popleft()
            data = self._parts.pop(source, bytearray())
            data += memoryview(buffer)[: self._status.Get_count(MPI.BYTE)]
            self._post_receive(buffer)
            self._pause_s = FIRST_PAUSE_S
            try:
                if len(data) >= message_bytes(data):
                    return source, decode(data)
            except WireError as error:
                raise WireError(f"from rank {source}: {error}") from None
            self._parts[source] = data
        return None

    async def receive(self) -> tuple[int, Message]:
        """Return the next (source rank, message), while other tasks of the event loop run."""
        self._received += 1
        if self._received % _YIELD_EVERY == 0:
            await asyncio.sleep(0)
        while (got := self.poll()) is None:
            await asyncio.sleep(self._next_pause())
        return got

    def receive_blocking(self, deadline_s: float | None, waiting_for: str) -> tuple[int, Message]:
        """Return the next (source rank, message), in a rank without an event loop. Raises
        `TimeoutError`, which names `waiting_for`, after `deadline_s` seconds."""
        end = None if deadline_s is None else time.monotonic() + deadline_s
        while (got := self.poll()) is None:
            if end is not None and time.monotonic() > end:
                raise TimeoutError(f"rank {self.rank} waited {deadline_s:.0f} s for {waiting_for}")
            time.sleep(self._next_pause())
        return got

    def flush(self, deadline_s: float) -> bool:
        """Wait until every queued message is sent; return False if the deadline passes first."""
        end = time.monotonic() + deadline_s
        while self._sending and time.monotonic() < end:
            self._drop_completed_sends()
            time.sleep(FIRST_PAUSE_S)
        return not self._sending

    def close(self) -> None:
        """Cancel the receives, before MPI_Finalize. Messages that arrive later are lost."""
        while self._receiving:
            request, _ = self._receiving.popleft()
            request.Cancel()
            request.Wait()

    def _next_pause(self) -> float:
        pause, self._pause_s = self._pause_s, min(self._pause_s * 1.5, IDLE_PAUSE_S)
        return pause

    def _drop_completed_sends(self) -> None:
        while self._sending and self._sending[0][0].Test():
            self._sending.popleft()


def share_text(comm: MPI.Comm, text: str | None, deadline_s: float, what: str) -> str:
    """Return rank 0's short text on every rank; collective. Waiting ranks leave the CPU to rank 0.
    Raises `TimeoutError`, which names `what`, if it doesn't arrive within `deadline_s` seconds."""
    import numpy as np

    data = np.frombuffer((text or "").encode(), dtype=np.uint8)
    size = np.array([data.size], dtype=np.int64)
    end = time.monotonic() + deadline_s
    _wait(comm.Ibcast(size), end, what)
    buffer = data.copy() if comm.Get_rank() == 0 else np.empty(int(size[0]), dtype=np.uint8)
    _wait(comm.Ibcast(buffer), end, what)
    return buffer.tobytes().decode()


def gather_texts(comm: MPI.Comm, text: str, deadline_s: float, what: str) -> list[str]:
    """Return every rank's short text, by rank; collective. Raises `TimeoutError`, which names
    `what`, if a text does not arrive within `deadline_s` seconds."""
    import numpy as np

    mine = np.frombuffer(text.encode(), dtype=np.uint8)
    sizes = np.zeros(comm.Get_size(), dtype=np.int64)
    end = time.monotonic() + deadline_s
    _wait(comm.Iallgather(np.array([mine.size], dtype=np.int64), sizes), end, what)
    found = np.empty(int(sizes.sum()), dtype=np.uint8)
    starts = np.concatenate(([0], np.cumsum(sizes)))
    _wait(comm.Iallgatherv(mine.copy(), [found, (sizes, starts[:-1]), MPI.BYTE]), end, what)
    return [found[a:b].tobytes().decode() for a, b in zip(starts[:-1], starts[1:], strict=True)]


def _wait(request: MPI.Request, end: float, what: str) -> None:
    while not request.Test():
        if time.monotonic() > end:
            raise TimeoutError(f"not every rank arrived for {what}")
        time.sleep(0.001)


def split_by_role(comm: MPI.Comm, role: Role) -> MPI.Comm:
    """Return the communicator of this rank's role, in which its rank is the index; collective."""
    return comm.Split(color=list(Role).index(role), key=comm.Get_rank())
