"""The pieces of broadcast files over NCCL; their headers come over MPI (`rose.transfer.broadcast`).

A header comes first and says what to expect: no rank waits inside of NCCL, where it would keep a
part of its GPU busy, for a file whose trainer rank is still encoding.

There is one process group per trainer rank, {that rank, the receiving rollout ranks}, made directly
and apart from the default one: DeepSpeed's collectives don't meet these. Pieces go pinned host ->
GPU -> NCCL -> GPU -> pinned host.

For GPUs. On a CPU (gloo, in tests only) torch starts threads in the rollout rank, which its
engine's fork does not survive; on GPUs vLLM spawns.
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
    """Collective over `group`, all trainer and rollout ranks. `comms`: by trainer rank, its
    communicator with the receiving ranks, as far as this rank is in it. `window` pieces of at most
    `nbytes` are under way. `device`: this rank's; its type, the same at all ranks, decides for NCCL
    or gloo. Every rank of `comms` needs a GPU that it shares with no other."""

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
        timeout = timedelta(seconds=2 * deadline_s)  # ours, which says more, comes first
        self._store = distributed.TCPStore(
            place.address,
            place.port,
            is_master=group.Get_rank() == 0,
            timeout=timeout,
            wait_for_workers=False,
            master_listen_fd=place.detach_listener(),
        )
        self._sends = sends
        self._copies = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._slots = [_Slot(nbytes, device) for _ in range(window)]
        self._groups = {}
        for root, comm in comms.items():
            store = distributed.PrefixStore(f"root-{root}", self._store)
            made = _group(store, comm.Get_rank(), comm.Get_size(), timeout, device)
            # NCCL connects at the first collective: here, where all ranks may wait for each other
            made.broadcast(torch.zeros(1, dtype=torch.uint8, device=device), 0).wait()
            self._groups[root] = made

    def start(self, root: int, piece: np.ndarray, slot: int) -> _Slot:
        return self._slots[slot].start(self._groups[root], piece, self._copies, self._sends)

    def abort(self) -> None:
        """Nothing is started afterwards. NCCL's pieces that wait for a late rank would stay on the
        device's queue, and torch's watchdog ends a process whose collective passes its timeout."""
        for group in self._groups.values():
            group.abort()


class _Slot:
    """Room for a piece under way: `host`, pinned, and `staged` on the GPU (`host` itself without
    one), uint8 (nbytes,)."""

    def __init__(self, nbytes: int, device: torch.device):
        self._host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self._staged = self._host
        if device.type == "cuda":
            self._staged = torch.empty(nbytes, dtype=torch.uint8, device=device)

    def start(self, group, piece: np.ndarray, copies, sends: bool) -> _Slot:
        self._into = None if sends else piece
        host, staged = self._host[: piece.size], self._staged[: piece.size]
        if sends:
            host.numpy()[:] = piece
        if copies is None:
            work = group.broadcast(host, 0)
            self._done, self._check = work.is_completed, work.wait
            return self
        with torch.cuda.stream(copies):
            if sends:
                staged.copy_(host, non_blocking=True)
            group.broadcast(staged, 0).wait()  # of this stream for NCCL's; the caller goes on
            if not sends:
                host.copy_(staged, non_blocking=True)
            event = copies.record_event()
            self._done, self._check = event.query, event.synchronize
        return self

    def Test(self) -> bool:
        if not self._done():
            return False
        self._check()  # raises what went wrong
        if self._into is not None:
            self._into[:] = self._host.numpy()[: self._into.size]
        return True


def _group(
    store: distributed.Store, rank: int, size: int, timeout: timedelta, device: torch.device
):
    if device.type == "cpu":
        return distributed.ProcessGroupGloo(store, rank, size, timeout)
    options = distributed.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return distributed.ProcessGroupNCCL(store, rank, size, options)
