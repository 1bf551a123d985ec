"""Send the pieces of broadcast files by NCCL. MPI sends their headers (`rose.transfer.broadcast`).

A rank starts NCCL's collectives for a file only after it has received the file's header by MPI. So
no rank waits inside NCCL, where it would occupy part of its GPU, while a trainer rank encodes.

Each trainer rank has a process group with the receiving rollout ranks. It is created directly and
not from the default group, so that DeepSpeed's collectives don't interfere. A piece goes from
pinned host memory to the GPU, through NCCL to the other GPUs, and from there to pinned host memory.

This is for GPUs. On a CPU (gloo, in tests only) torch starts threads in the rollout rank, and its
engine can't be forked after that. On GPUs vLLM spawns its processes.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta

import numpy as np
import torch
from mpi4py import MPI
from torch import distributed

from rose.comm import address
from rose.comm.mailbox import gather_texts


class TorchPieces:
    """Carries pieces by this rank's process groups and `window` buffers of `nbytes` bytes.

    Construction is collective over `group`, all trainer and rollout ranks. `comms` has, by trainer
    rank, each communicator with the receiving ranks that contains this rank. `device` is this
    rank's; its type is the same on all ranks and selects NCCL or gloo. Every rank of `comms` needs
    a GPU of its own."""

    def __init__(
        self,
        group: MPI.Comm,
        comms: Mapping[int, MPI.Comm],
        sends: bool,
        deadline_s: float,
        window: int,
        nbytes: int,
        device: torch.device,
        interface: str | None,
    ):
        place = address.meet(
            lambda text: gather_texts(group, text, address.MEET_S, "the broadcast's addresses"),
            group.Get_rank(),
            interface,
        )
        if not comms:
            return
        place.use_interface()
        # Longer than `Broadcast.deadline_s`, whose error says more.
        timeout = timedelta(seconds=2 * deadline_s)
        self._store = distributed.TCPStore(
            place.address,
            place.port,
            is_master=group.Get_rank() == 0,
            timeout=timeout,
            wait_for_workers=False,
            master_listen_fd=place.detach_listener(),
        )
        self._sends = sends
        self._copy_stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._slots = [_Slot(nbytes, device) for _ in range(window)]
        self._groups = {}
        for root, comm in comms.items():
            store = distributed.PrefixStore(f"root-{root}", self._store)
            made = _process_group(store, comm.Get_rank(), comm.Get_size(), timeout, device)
            # NCCL connects at the first collective, so run one here, where ranks may wait for
            # others.
            made.broadcast(torch.zeros(1, dtype=torch.uint8, device=device), 0).wait()
            self._groups[root] = made

    def start(self, root: int, piece: np.ndarray, slot: int) -> _Slot:
        return self._slots[slot].start(self._groups[root], piece, self._copy_stream, self._sends)

    def abort(self) -> None:
        """Abort all groups; start nothing afterwards. Without that, pieces that wait for a late
        rank would stay in the device's queue until torch's watchdog ends the process."""
        for group in self._groups.values():
            group.abort()


class _Slot:
    """Buffers (nbytes,) uint8 for a piece in flight: `_host`, pinned, and `_staged` on the GPU
    (without a GPU the same tensor)."""

    def __init__(self, nbytes: int, device: torch.device):
        self._host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self._staged = self._host
        if device.type == "cuda":
            self._staged = torch.empty(nbytes, dtype=torch.uint8, device=device)

    def start(self, group, piece: np.ndarray, copy_stream, sends: bool) -> _Slot:
        """Begin to send or receive a piece."""
        self._into = None if sends else piece
        host, staged = self._host[: piece.size], self._staged[: piece.size]
        if sends:
            host.numpy()[:] = piece
        if copy_stream is None:
            work = group.broadcast(host, 0)
            self._done, self._check = work.is_completed, work.wait
            return self
        with torch.cuda.stream(copy_stream):
            if sends:
                staged.copy_(host, non_blocking=True)
            # The copy stream waits for NCCL's; the caller does not wait.
            group.broadcast(staged, 0).wait()
            if not sends:
                host.copy_(staged, non_blocking=True)
            event = copy_stream.record_event()
            self._done, self._check = event.query, event.synchronize
        return self

    def Test(self) -> bool:
        """Return True if the piece is done; see `Transit` of broadcast.py."""
        if not self._done():
            return False
        self._check()  # raises the error of a failed transfer
        if self._into is not None:
            self._into[:] = self._host.numpy()[: self._into.size]
        return True


def _process_group(
    store: distributed.Store, rank: int, size: int, timeout: timedelta, device: torch.device
):
    if device.type == "cpu":
        return distributed.ProcessGroupGloo(store, rank, size, timeout)
    options = distributed.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return distributed.ProcessGroupNCCL(store, rank, size, options)
