"""Exchange messages through an MPI intercommunicator whose two processes may vanish at any time.

When a peer dies, MPI either reports nothing or ends this process (MPICH treats a broken connection
as fatal). So a link lives in a process that may die, never in a rank of the training's MPI world.
No call waits for the peer. Messages that MPI doesn't accept yet stay in the outbox. A message that
has arrived in part is returned by a later call. The caller decides when a silent peer is lost.

MPICH would retry a send to a dead peer for ever, inside Isend. The hint "eagain" together with
MPIR_CVAR_CH4_OFI_MAX_EAGAIN_RETRY (conf/cluster/mpi) bounds the retries of each call.
"""

from __future__ import annotations

import time
from collections import deque

from mpi4py import MPI

# Bounds a message: the largest of rose.comm.wire (256 MiB) with its header.
MAX_BYTES = 2**28 + 64
_TAG = 7
# Probes per call. MPICH (ch4:ofi) doesn't report a message at the probe that starts receiving it.
_PROBES = 4
# The link fails after this many MPI errors in a row; a single error may be temporary.
_ERRORS_IN_A_ROW = 1000


class LinkError(RuntimeError):
    """The link can't be used any more."""


class Link:
    """Sends and receives whole messages as bytes, in order."""

    def __init__(self, comm: MPI.Intercomm) -> None:
        comm.Set_errhandler(MPI.ERRORS_RETURN)
        info = MPI.Info.Create()
        info.Set("eagain", "true")
        comm.Set_info(info)
        info.Free()
        self._comm = comm
        self._status = MPI.Status()
        self._outbox: deque[bytes] = deque()
        self._sending: deque[tuple[MPI.Request, bytes]] = deque()
        self._receiving: tuple[MPI.Request, bytearray] | None = None
        self._errors = 0
        self.last_seen = time.monotonic()

    def send(self, data: bytes) -> None:
        """Queue a message and return at once. Raises `LinkError`."""
        self._outbox.append(data)
        self.push()

    def push(self) -> bool:
        """Send what MPI accepts of the queue. Return True once all is sent. Raises `LinkError`."""
        try:
            while self._outbox:
                request = self._comm.Isend([self._outbox[0], MPI.BYTE], dest=0, tag=_TAG)
                self._sending.append((request, self._outbox.popleft()))
            while self._sending and self._sending[0][0].Test():
                self._sending.popleft()
        except MPI.Exception as error:
            self._count_error(error)
        return not (self._outbox or self._sending)

    def take(self) -> bytearray | None:
        """Return the next message if all of it has arrived, else None. Raises `LinkError`."""
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
            self._count_error(error)
        return None

    def _count_error(self, error: MPI.Exception) -> None:
        self._errors += 1
        if self._errors > _ERRORS_IN_A_ROW:
            raise LinkError(f"MPI: {' '.join(str(error).split())[:200]}") from None
