"""Streams of encoded payloads from every trainer rank to all dedicated rollout ranks, while the
next ones are encoded.

A stream is one trainer rank's share of one edge: BEGIN with the edge's name, the payloads' bytes in
frames, the table's bytes in frames, END. Frames hold no boundaries of payloads: the table tells
where each lies. A root fills a frame, hands it to its sending thread and goes on; a receiver hands
what comes to a `Sink` and never blocks its event loop. How frames travel:
rose/transfer/broadcast_mpi.py (CPU) and broadcast_nccl.py (GPUs).

Every frame says its place (sequence number, offset) and END says the sums, so a lost or repeated
frame is an error here. There is no hash of frames: readers check xxh3-128 of every block that they
decode, which also covers what may happen to the mirror, and go to the files when it differs.

This file imports neither MPI nor torch until `make_broadcast` chooses one.
"""

from __future__ import annotations

import enum
import queue
import re
import struct
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from rose.transfer.errors import TransferError

# Of a frame's body. 128 KiB to 4 MiB were equally quick, within this machine's noise; a receiver's
# loop stood still for 4 to 9 ms of computing at most with 8 frames of 1 MiB, for 10 to 14 with 4 of
# 4.
FRAME_BYTES = 1 << 20
FRAMES = 8  # per rank: the root's in flight, a receiver's that come and go on
# between two looks at frames in flight; MPI moves a large message only when it is called
_TICK_S = 0.0003
_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)*")  # becomes a folder in the mirror


class Kind(enum.IntEnum):
    BEGIN = 1  # body: the name, UTF-8
    PAYLOAD = 2
    TABLE = 3
    END = 4  # no body


@dataclass(frozen=True)
class Header:
    """What precedes a frame's body. `at`: bytes of this kind sent before; END: of the payload in
    all."""

    kind: Kind
    root: int  # index of the trainer rank
    sequence: int  # of the frame among all of its root
    length: int  # bytes of the body
    at: int

    LAYOUT = struct.Struct("<4sHHIIQ")
    MAGIC = b"RSB1"

    def write(self, buffer: memoryview) -> None:
        self.LAYOUT.pack_into(
            buffer, 0, self.MAGIC, self.kind, self.root, self.sequence, self.length, self.at
        )

    @classmethod
    def read(cls, buffer: memoryview) -> Header:
        """Raises `TransferError` on bytes that are no header."""
        magic, kind, *rest = cls.LAYOUT.unpack_from(buffer)
        if magic != cls.MAGIC or kind not in list(Kind):
            raise TransferError(
                f"a broadcast frame begins with {cls.MAGIC!r} and a kind from 1 to {len(Kind)}, "
                f"this one with {magic!r} and {kind}"
            )
        return cls(Kind(kind), *rest)


HEADER_BYTES = Header.LAYOUT.size


class Frame:
    """Header and body in one buffer, so that both may travel as one message."""

    def __init__(self, buffer: np.ndarray | None = None) -> None:
        self.buffer = np.empty(HEADER_BYTES + FRAME_BYTES, np.uint8) if buffer is None else buffer
        self.view = memoryview(self.buffer)
        self.body = self.view[HEADER_BYTES:]
        self.filled = 0  # bytes of the body


class Transit(Protocol):
    """Something under way: an `MPI.Request`, or one that looks like it."""

    def Test(self) -> bool: ...


class Sink(Protocol):
    """Takes a receiver's frames, of each root in order. `data` is only lent for the call. Must be
    quick."""

    def begin(self, root: int, name: str) -> None: ...
    def payload(self, root: int, data: memoryview) -> None: ...
    def table(self, root: int, data: memoryview) -> None: ...
    def end(self, root: int) -> None: ...


class Broadcast(ABC):
    """One rank's end, for as long as its process lives: MPI keeps the posted buffers. A trainer
    rank calls `begin`; a rollout rank keeps `receive` running, from before the first stream begins
    until the last has ended, also while its engine is down: other ranks' frames come through it."""

    @abstractmethod
    def begin(self, name: str) -> Stream:
        """On a trainer rank: starts its stream of the edge `name`. Raises `TransferError` when its
        last one is not finished, or on a name that can't be a relative path."""

    @abstractmethod
    async def receive(self, sink: Sink) -> None:
        """On a rollout rank: hand all roots' frames to `sink`, until cancelled.

        Raises `TransferError` when a root that has begun a stream is silent for `deadline_s`
        seconds, when a rank that this one passes frames on to takes none for as long, or when
        frames are missing. Called again after the first two it goes on where it was.
        """


def make_broadcast(
    kind: str,
    world,
    trainers: Sequence[int],
    rollouts: Sequence[int],
    deadline_s: float,
    interface: str | None = None,
) -> Broadcast | None:
    """This rank's end of the broadcast from the MPI ranks `trainers` to `rollouts` of `world` (an
    `MPI.Comm`), each in the order of its role's indices; `interface` (cluster.interface) is for
    NCCL's. None for kind "none", without rollout ranks, and on a rank that is neither.

    Collective over those ranks, and only those. Raises `TransferError` on another kind than "mpi",
    "nccl" or "none", and for "nccl" where this process sees no GPU.
    """
    if kind not in ("mpi", "nccl", "none"):
        raise TransferError(f"transfer.broadcast={kind!r}; known are 'mpi', 'nccl' and 'none'")
    me = world.Get_rank()
    if kind == "none" or not rollouts or me not in (*trainers, *rollouts):
        return None
    if kind == "mpi":
        from rose.transfer.broadcast_mpi import MpiBroadcast

        return MpiBroadcast(world, trainers, rollouts, deadline_s)
    import torch

    if not (torch.cuda.is_available() and torch.distributed.is_nccl_available()):
        raise TransferError(
            f"transfer.broadcast='nccl': MPI rank {me} has no GPU, or a torch without NCCL; "
            "'mpi' needs neither"
        )
    from rose.transfer.broadcast_nccl import TorchBroadcast

    return TorchBroadcast(
        world,
        trainers,
        rollouts,
        deadline_s,
        torch.device("cuda", torch.cuda.current_device()),
        interface,
    )


class Stream:
    """One root's open stream. `send` and `finish` belong to one thread; a thread of the stream's
    own drives what is in flight: of 8 MPI messages of 1 MiB none arrived while their sender
    computed. Encoders run outside the GIL.

    `sequence`: of the next frame. `frames`: free ones, at least 2; `start` puts one on its way.
    `blocked_s`: seconds in which `send` and `finish` waited for receivers.
    """

    def __init__(
        self,
        name: str,
        root: int,
        sequence: int,
        frames: list[Frame],
        start: Callable[[Frame], list[Transit]],
        deadline_s: float,
        receivers: str,
    ) -> None:
        if not _NAME.fullmatch(name):
            raise TransferError(
                f"a broadcast's name is {name!r}; it must be a relative path of letters, digits, "
                "'_', '-' and '.'"
            )
        self.name, self.root, self.deadline_s, self.blocked_s = name, root, deadline_s, 0.0
        self.finished = False
        self._receivers, self._start = receivers, start
        self.sequence = sequence
        self._bytes = dict.fromkeys(Kind, 0)  # sent of each kind
        self._count = len(frames)
        self._free: queue.SimpleQueue[Frame | BaseException] = queue.SimpleQueue()
        for frame in frames:
            self._free.put(frame)
        self._full: queue.SimpleQueue[Frame | None] = queue.SimpleQueue()
        self._abandoned = threading.Event()
        self._frame: Frame | None = None  # being filled with payload
        threading.Thread(target=self._drive, name=f"broadcast-{name}", daemon=True).start()
        self._append(Kind.BEGIN, name.encode())
        self._flush(Kind.BEGIN)

    def send(self, data: bytes | bytearray | memoryview | np.ndarray) -> None:
        """The next payload's bytes, which are copied. Returns at once while frames are free, else
        when one is.

        Raises `TransferError` when the receivers took no frame for `deadline_s` seconds.
        """
        self._append(Kind.PAYLOAD, data)

    def finish(self, table: bytes | bytearray | memoryview | np.ndarray) -> None:
        """The table, and the end. Returns when all frames have left, or raises as `send` does."""
        self._flush(Kind.PAYLOAD)
        self._append(Kind.TABLE, table)
        self._flush(Kind.TABLE)
        self._frame = self._take()
        self._flush(Kind.END)
        for _ in range(self._count):
            self._take()
        self._full.put(None)
        self.finished = True

    def _append(self, kind: Kind, data) -> None:
        rest = memoryview(data).cast("B")
        while len(rest):
            if self._frame is None:
                self._frame = self._take()
            filled = self._frame.filled
            part = rest[: FRAME_BYTES - filled]
            self._frame.body[filled : filled + len(part)] = part
            self._frame.filled += len(part)
            rest = rest[len(part) :]
            if self._frame.filled == FRAME_BYTES:
                self._flush(kind)

    def _flush(self, kind: Kind) -> None:
        """Send the frame that is being filled, if there is one."""
        frame, self._frame = self._frame, None
        if frame is None:
            return
        at = self._bytes[Kind.PAYLOAD if kind is Kind.END else kind]
        Header(kind, self.root, self.sequence, frame.filled, at).write(frame.view)
        self._bytes[kind] += frame.filled
        self.sequence += 1
        self._full.put(frame)

    def _take(self) -> Frame:
        began = time.monotonic()
        try:
            frame = self._free.get(timeout=self.deadline_s)
        except queue.Empty:
            self._abandoned.set()
            raise TransferError(
                f"broadcast of {self.name!r} by trainer rank {self.root}: {self._receivers} took no "
                f"frame for {self.deadline_s:g} s, after {self._bytes[Kind.PAYLOAD]} bytes"
            ) from None
        self.blocked_s += time.monotonic() - began
        if isinstance(frame, BaseException):
            raise TransferError(
                f"broadcast of {self.name!r} by trainer rank {self.root}: {frame}"
            ) from frame
        frame.filled = 0
        return frame

    def _drive(self) -> None:
        """The thread: start full frames, free those that have left, until there is nothing more to
        come."""
        under_way: deque[tuple[Frame, list[Transit]]] = deque()
        try:
            while not self._abandoned.is_set():
                try:
                    frame = (
                        self._full.get(timeout=_TICK_S)
                        if under_way
                        else self._full.get(timeout=self.deadline_s)
                    )
                    if frame is None:
                        return
                    under_way.append((frame, self._start(frame)))
                except queue.Empty:
                    pass
                while under_way and all([transit.Test() for transit in under_way[0][1]]):
                    self._free.put(under_way.popleft()[0])
        except Exception as error:  # MPI's or torch's, whichever carries the frames
            self._free.put(error)


@dataclass
class _Open:
    """What a receiver knows of a stream that has begun."""

    name: str
    heard: float  # time.monotonic() of its last frame
    # bytes of each kind
    seen: dict[Kind, int] = field(default_factory=lambda: dict.fromkeys(Kind, 0))


class Assembly:
    """Checks the order of frames at a receiver and hands them to its sink; notices roots that fall
    silent."""

    def __init__(self, deadline_s: float) -> None:
        self.deadline_s = deadline_s
        self._open: dict[int, _Open] = {}  # by root

    def take(self, header: Header, body: memoryview, sink: Sink) -> None:
        """Raises `TransferError` when this can't be the next frame of its root."""
        stream = self._open.get(header.root)
        if (stream is None) != (header.kind is Kind.BEGIN):
            raise TransferError(
                f"a {header.kind.name} frame came from trainer rank {header.root}, whose broadcast of "
                f"{stream.name if stream else 'an edge'!r} has {'' if stream else 'not '}begun"
            )
        if stream is None:
            name = str(body, "utf-8")
            self._open[header.root] = _Open(name, time.monotonic())
            sink.begin(header.root, name)
            return
        seen = stream.seen[Kind.PAYLOAD if header.kind is Kind.END else header.kind]
        if header.at != seen:
            raise TransferError(
                f"broadcast of {stream.name!r} by trainer rank {header.root}: a {header.kind.name} "
                f"frame for byte {header.at} came after {seen} bytes"
            )
        stream.heard = time.monotonic()
        stream.seen[header.kind] += len(body)
        match header.kind:
            case Kind.PAYLOAD:
                sink.payload(header.root, body)
            case Kind.TABLE:
                sink.table(header.root, body)
            case Kind.END:
                del self._open[header.root]
                sink.end(header.root)

    def check_silence(self) -> None:
        """When nothing is here to be taken. Raises `TransferError` naming the root and what it has
        sent."""
        now = time.monotonic()
        for root, stream in self._open.items():
            if now - stream.heard > self.deadline_s:
                stream.heard = now
                raise TransferError(
                    f"broadcast of {stream.name!r} by trainer rank {root}: no frame for "
                    f"{self.deadline_s:g} s, after {stream.seen[Kind.PAYLOAD]} bytes of payload"
                )
