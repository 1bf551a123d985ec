"""One intercommunicator between two processes of which either may vanish at any instruction.

MPI does not report a peer's death, or ends this process for it (MPICH calls a broken connection
fatal): so a link lives in a process that may die, never in one of the training's world. Nothing
here waits for the peer: what MPI does not take stays in the outbox, and the rest of a large message
is not waited for. Who is gone, the owner decides by silence.

MPICH would try for ever to send to a dead peer, inside Isend. The hint "eagain" with
MPIR_CVAR_CH4_OFI_MAX_EAGAIN_RETRY (conf/cluster/mpi) makes it give up each time.
"""

from __future__ import annotations

import time
from collections import deque

from mpi4py import MPI

MAX_BYTES = 2**28 + 64  # a message of rose.comm.wire
_TAG = 7
_PROBES = 4  # MPICH (ch4:ofi) denies a message once, while it takes it in
_ERRORS_IN_A_ROW = 1000


class LinkError(RuntimeError):
    """MPI can do nothing more with this link."""


class Link:
    """Whole messages as bytes, in order."""

    def __init__(self, comm: MPI.Intercomm) -> None:
        comm.Set_errhandler(MPI.ERRORS_RETURN)
        info = MPI.Info.Create()
        info.Set("eagain", "true")
        comm.Set_info(info)
        info.Free()
        self._comm, self._status = comm, MPI.Status()
        self._outbox: deque[bytes] = deque()
        self._sending: deque[tuple[MPI.Request, bytes]] = deque()
        self._receiving: tuple[MPI.Request, bytearray] | None = None
        self._errors = 0
        self.last_seen = time.monotonic()

    def send(self, data: bytes) -> None:
        """Returns at once. Raises `LinkError`."""
        self._outbox.append(data)
        self.push()

    def push(self) -> bool:
        """Send what is queued as far as MPI takes it; whether all has left. Raises `LinkError`."""
        try:
            while self._outbox:
                request = self._comm.Isend([self._outbox[0], MPI.BYTE], dest=0, tag=_TAG)
                self._sending.append((request, self._outbox.popleft()))
            while self._sending and self._sending[0][0].Test():
                self._sending.popleft()
        except MPI.Exception as error:
            self._failed(error)
        return not (self._outbox or self._sending)

    def take(self) -> bytearray | None:
        """The next message if it is here, whole. Raises `LinkError`."""
        self.push()
        try:
            if self._receiving is None and any(
                self._comm.Iprobe(source=0, tag=_TAG, status=self._status) for _ in range(_PROBES)
            ):
                count = self._status.Get_count(MPI.BYTE)
                if not 0 <= count <= MAX_BYTES:
                    raise LinkError(f"the peer sends {count} bytes at once, more than {MAX_BYTES}")
                buffer = bytearray(count)
                self._receiving = (self._comm.Irecv([buffer, MPI.BYTE], source=0, tag=_TAG), buffer)
            self._errors = 0
            if self._receiving is not None and self._receiving[0].Test():
                _, buffer = self._receiving
                self._receiving, self.last_seen = None, time.monotonic()
                return buffer
        except MPI.Exception as error:
            self._failed(error)
        return None

    def _failed(self, error: MPI.Exception) -> None:
        self._errors += 1
        if self._errors > _ERRORS_IN_A_ROW:
            raise LinkError(f"MPI: {' '.join(str(error).split())[:200]}") from None
