"""Broadcast with the bodies of frames over NCCL and their headers over MPI.

A header comes first, along the ranks of broadcast_mpi, and says what to expect: no rank waits
inside of NCCL, where it would keep a part of its GPU busy, for a frame whose root is still
encoding. It also gives the collectives of all roots one order, the same at every rollout rank, as
NCCL wants it of several communicators on one GPU.

There is one process group per trainer rank, {that rank, all rollout ranks}, made directly and apart
from the default one: DeepSpeed's collectives don't meet these. Bodies go pinned host -> GPU -> NCCL
-> GPU -> pinned host.

For GPUs. On a CPU (gloo, in tests only) torch starts threads in the rollout rank, which its
engine's fork does not survive; on GPUs vLLM spawns.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch
from mpi4py import MPI
from torch import distributed

from rose.comm import address
from rose.comm.mailbox import gather_texts
from rose.transfer.broadcast import FRAME_BYTES, HEADER_BYTES, Frame, Header, Transit
from rose.transfer.broadcast_mpi import MpiBroadcast

CPU = torch.device("cpu")


class TorchFrame(Frame):
    """Its body is also a tensor, uint8 (FRAME_BYTES,): `host`, and `staged` on the GPU (`host`
    itself without one)."""

    def __init__(self, device: torch.device) -> None:
        pinned = torch.empty(
            HEADER_BYTES + FRAME_BYTES, dtype=torch.uint8, pin_memory=device.type == "cuda"
        )
        super().__init__(pinned.numpy())
        self.host = pinned[HEADER_BYTES:]
        self.staged = (
            self.host
            if device.type == "cpu"
            else torch.empty(FRAME_BYTES, dtype=torch.uint8, device=device)
        )


class TorchBroadcast(MpiBroadcast):
    """Collective as `MpiBroadcast` is. `device`: this rank's; its type, the same at all ranks,
    decides for NCCL or gloo. Every trainer and rollout rank needs a GPU that it shares with no
    other."""

    def __init__(
        self,
        world: MPI.Comm,
        trainers: Sequence[int],
        rollouts: Sequence[int],
        deadline_s: float,
        device: torch.device = CPU,
        interface: str | None = None,
    ) -> None:
        super().__init__(world, trainers, rollouts, deadline_s)
        self._device = device
        self._stream_of_copies = torch.cuda.Stream(device) if device.type == "cuda" else None
        first = self._comm.Get_rank() == 0
        # who imports from a cold file system is minutes late, and no fault of the network's
        gather_texts(
            self._comm,
            "",
            max(address.MEET_S, deadline_s),
            "the broadcast's start (transfer.load_timeout_s)",
        )
        place = address.meet(
            lambda text: gather_texts(
                self._comm, text, address.MEET_S, "the broadcast's addresses"
            ),
            self._comm.Get_rank(),
            interface,
        )
        place.use_interface()
        timeout = timedelta(seconds=2 * deadline_s)  # ours, which says more, comes first
        self._store = distributed.TCPStore(
            place.address,
            place.port,
            is_master=first,
            timeout=timeout,
            wait_for_workers=False,
            master_listen_fd=place.claim(),
        )
        self._groups = {}  # by root
        for root in range(len(trainers)) if self.root is None else [self.root]:
            rank = 0 if self.root is not None else 1 + self.receiver
            store = distributed.PrefixStore(f"root-{root}", self._store)
            self._groups[root] = _group(store, rank, 1 + len(rollouts), timeout, device)
            # NCCL connects at the first collective: here, where all ranks may wait for each other
            self._groups[root].broadcast(torch.zeros(1, dtype=torch.uint8, device=device), 0).wait()

    def _new_frame(self) -> TorchFrame:
        return TorchFrame(self._device)

    def _start(self, frame: TorchFrame) -> list[Transit]:
        header = Header.read(frame.view)
        body = self._move(frame, header)
        return [*self._send_on(frame, header), *([] if body is None else [body])]

    def _send_on(self, frame: TorchFrame, header: Header) -> list[Transit]:
        message = frame.view[:HEADER_BYTES]
        return [self._comm.Isend([message, MPI.BYTE], rank, 0) for rank in self._next]

    def _receive_body(self, frame: TorchFrame, header: Header) -> Transit | None:
        return self._move(frame, header)

    def _move(self, frame: TorchFrame, header: Header) -> Transit | None:
        if not header.length:
            return None
        host, staged, group = (
            frame.host[: header.length],
            frame.staged[: header.length],
            self._groups[header.root],
        )
        if self._stream_of_copies is None:
            return _OnHost(group.broadcast(host, 0))
        with torch.cuda.stream(self._stream_of_copies):
            if self.root is not None:
                staged.copy_(host, non_blocking=True)
            group.broadcast(staged, 0).wait()  # of this stream for NCCL's; the caller goes on
            if self.root is None:
                host.copy_(staged, non_blocking=True)
            return _OnDevice(self._stream_of_copies.record_event())


class _OnHost:
    def __init__(self, work: distributed.Work) -> None:
        self._work = work

    def Test(self) -> bool:
        if not self._work.is_completed():
            return False
        self._work.wait()  # raises what went wrong
        return True


class _OnDevice:
    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def Test(self) -> bool:
        return self._event.query()


def _group(
    store: distributed.Store, rank: int, size: int, timeout: timedelta, device: torch.device
):
    if device.type == "cpu":
        return distributed.ProcessGroupGloo(store, rank, size, timeout)
    options = distributed.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return distributed.ProcessGroupNCCL(store, rank, size, options)
