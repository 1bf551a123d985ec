"""Broadcast over MPI point-to-point messages: each root sends once, the rollout ranks pass frames
on.

    trainer 0 --+                +--> rollout 1 --> rollouts 3, 4
    trainer 1 --+--> rollout 0 --+
                                 +--> rollout 2 --> rollouts 5, 6

All roots send to the first rollout rank, which so decides one order of all frames, the same at
every rank. A frame is passed on before it is handed over here. One message carries header and body:
a receive may be longer than what comes, so nothing has to be known before. MPI_Ibcast would need
each length in a broadcast before it, by all ranks in the same order of roots, and moves only when
every rank of its tree happens to be inside MPI.

All receives are posted before, from any source, and nothing is probed: with MPICH 5.0.2 over
"tcp;ofi_rxm", Iprobe or Improbe followed by Irecv while other large receives were pending completed
with the right count and no data.

The communicator is made by MPI_Comm_create_group among trainer and rollout ranks alone: no other
rank takes part.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Sequence

from mpi4py import MPI

from rose.transfer.broadcast import (
    FRAMES,
    Assembly,
    Broadcast,
    Frame,
    Header,
    Sink,
    Stream,
    Transit,
)
from rose.transfer.errors import TransferError

# Ranks that a rollout rank sends each frame to. With 1 (a chain) nobody sends more than it
# receives, but every rank adds its poll to the way: 1 MiB reached 8 ranks on 2 cores in 81 ms, with
# 2 in 50; 64 MiB came equally fast.
PASS_ON = 2
_TAG = 0
_GROUP_TAG = 77  # of MPI_Comm_create_group on the world
_FIRST_PAUSE_S = 0.0002
_IDLE_PAUSE_S = 0.002


class MpiBroadcast(Broadcast):
    """Collective over the ranks `trainers` and `rollouts` of `world`, which are in the order of
    their roles' indices and at least one of each. Raises `TransferError` when MPI was not started
    for several threads."""

    def __init__(
        self, world: MPI.Comm, trainers: Sequence[int], rollouts: Sequence[int], deadline_s: float
    ) -> None:
        if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
            raise TransferError(
                "transfer.broadcast='mpi': a trainer rank sends in a thread of its own, and this MPI "
                f"gives thread level {MPI.Query_thread()}, not MPI_THREAD_MULTIPLE "
                f"({MPI.THREAD_MULTIPLE}); build it with that, or choose 'none'"
            )
        group = world.Get_group().Incl([*trainers, *rollouts])
        self._comm = world.Create_group(group, _GROUP_TAG)
        group.Free()
        self.deadline_s = deadline_s
        self._roots, self._receivers = len(trainers), list(rollouts)
        rank = self._comm.Get_rank()
        self.root = rank if rank < len(trainers) else None  # index of the trainer rank
        # index of the rollout rank
        self.receiver = rank - len(trainers) if self.root is None else None
        self._stream: Stream | None = None
        self._frames: list[Frame] = []  # all, made at first use
        self._next = [len(trainers)] if self.root is not None else self._children(len(trainers))
        self._assembly = Assembly(deadline_s)
        self._due = [0] * len(trainers)  # sequence number of each root's next frame
        self._coming: list[tuple[Frame, MPI.Request]] = []  # in the order of posting
        # body, then on to the next
        self._here: deque[tuple[Header, Frame, Transit | None, list[Transit]]] = deque()
        # handed over at this time
        self._leaving: deque[tuple[Frame, list[Transit], float]] = deque()

    def _children(self, first: int) -> list[int]:
        numbers = range(self.receiver * PASS_ON + 1, self.receiver * PASS_ON + PASS_ON + 1)
        return [first + number for number in numbers if number < len(self._receivers)]

    # ----------------------------------------------------------------- a root's side

    def begin(self, name: str) -> Stream:
        if self.root is None:
            raise TransferError(
                f"rollout rank {self.receiver} can't begin a broadcast of {name!r}: trainer ranks do"
            )
        if self._stream is not None and not self._stream.finished:
            raise TransferError(
                f"trainer rank {self.root} begins a broadcast of {name!r} before that of "
                f"{self._stream.name!r} is finished"
            )
        self._frames = self._frames or [self._new_frame() for _ in range(FRAMES)]
        sequence = self._stream.sequence if self._stream else 0
        self._stream = Stream(
            name,
            self.root,
            sequence,
            self._frames,
            self._start,
            self.deadline_s,
            f"rollout rank 0 (MPI rank {self._receivers[0]})",
        )
        return self._stream

    def _start(self, frame: Frame) -> list[Transit]:
        return self._send_on(frame, Header.read(frame.view))

    # ----------------------------------------------------------------- a receiver's side

    async def receive(self, sink: Sink) -> None:
        if not self._frames:
            self._frames = [self._new_frame() for _ in range(FRAMES)]
            for frame in self._frames:
                self._post(frame)
        pause = _FIRST_PAUSE_S
        while True:
            if self._advance(sink):
                pause = _FIRST_PAUSE_S
                await asyncio.sleep(0)
                continue
            self._check_deadlines()
            await asyncio.sleep(pause)
            pause = min(pause * 1.5, _IDLE_PAUSE_S)

    def _advance(self, sink: Sink) -> bool:
        """Whether anything moved."""
        moved = any([self._pass_on(), self._hand_over(sink)])
        while self._leaving and all([transit.Test() for transit in self._leaving[0][1]]):
            self._post(self._leaving.popleft()[0])
            moved = True
        return moved

    def _post(self, frame: Frame) -> None:
        self._coming.append(
            (frame, self._comm.Irecv([frame.buffer, MPI.BYTE], MPI.ANY_SOURCE, _TAG))
        )

    def _pass_on(self) -> bool:
        """Messages that are complete go to the next ranks, those of one root in their order. A
        large one may be overtaken by a small one that came later."""
        moved = False
        for coming in list(self._coming):
            frame, request = coming
            if not request.Test():
                if self.receiver == 0:
                    continue  # the next may be another root's
                break  # all come from one rank: its order is kept
            header = Header.read(frame.view)
            if header.sequence != self._due[header.root]:
                continue
            self._due[header.root] += 1
            self._coming.remove(coming)
            sends = self._send_on(frame, header)
            self._here.append((header, frame, self._receive_body(frame, header), sends))
            moved = True
        return moved

    def _hand_over(self, sink: Sink) -> bool:
        moved, late = False, set()
        for here in list(self._here):
            header, frame, body, sends = here
            if header.root in late or not (body is None or body.Test()):
                late.add(header.root)
                continue
            self._here.remove(here)
            self._leaving.append((frame, sends, time.monotonic()))
            self._assembly.take(header, frame.body[: header.length], sink)
            moved = True
        return moved

    def _check_deadlines(self) -> None:
        if self._leaving and time.monotonic() - self._leaving[0][2] > self.deadline_s:
            frame, sends, _ = self._leaving[0]
            self._leaving[0] = (frame, sends, time.monotonic())
            late = [
                rank - self._roots
                for rank, send in zip(self._next, sends, strict=True)
                if not send.Test()
            ]
            names = " and ".join(
                f"rollout rank {index} (MPI rank {self._receivers[index]})" for index in late
            )
            raise TransferError(
                f"rollout rank {self.receiver} passes broadcasts on to {names}, which took no frame "
                f"for {self.deadline_s:g} s"
            )
        self._assembly.check_silence()

    # ----------------------------------------------------------------- how a frame travels

    def _new_frame(self) -> Frame:
        return Frame()

    def _send_on(self, frame: Frame, header: Header) -> list[Transit]:
        """Start the frame's way to the next ranks: header and body as one message."""
        message = frame.view[: Header.LAYOUT.size + header.length]
        return [self._comm.Isend([message, MPI.BYTE], rank, _TAG) for rank in self._next]

    def _receive_body(self, frame: Frame, header: Header) -> Transit | None:
        """None: it came with the header."""
        return None
