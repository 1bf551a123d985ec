"""Broadcast with the pieces of files over NCCL and their headers over MPI.

A header comes first and says what to expect: no rank waits inside of NCCL, where it would keep a
part of its GPU busy, for a file whose trainer rank is still encoding.

There is one process group per trainer rank, {that rank, the receiving rollout ranks}, made directly
and apart from the default one: DeepSpeed's collectives don't meet these. Pieces go pinned host ->
GPU -> NCCL -> GPU -> pinned host.

For GPUs. On a CPU (gloo, in tests only) torch starts threads in the rollout rank, which its
engine's fork does not survive; on GPUs vLLM spawns.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
from mpi4py import MPI
from torch import distributed

from rose.comm import address
from rose.comm.mailbox import gather_texts
from rose.transfer.broadcast import PIECE, WINDOW, Broadcast, Transit

CPU = torch.device("cpu")


class TorchBroadcast(Broadcast):
    """Collective as `Broadcast` is. `device`: this rank's; its type, the same at all ranks, decides
    for NCCL or gloo. Every trainer rank and every receiving rank needs a GPU that it shares with no
    other."""

    def __init__(
        self,
        world: MPI.Comm,
        trainers: Sequence[int],
        rollouts: Sequence[int],
        deadline_s: float,
        run_dir: Path,
        limit_bytes: int,
        device: torch.device = CPU,
        interface: str | None = None,
        folder: Path | None = None,
    ):
        super().__init__(world, trainers, rollouts, deadline_s, run_dir, limit_bytes, folder)
        self._device = device
        place = address.meet(
            lambda text: gather_texts(
                self._group, text, address.MEET_S, "the broadcast's addresses"
            ),
            self._group.Get_rank(),
            interface,
        )
        if self.root is None and not self.writes:
            return
        place.use_interface()
        timeout = timedelta(seconds=2 * deadline_s)  # ours, which says more, comes first
        self._store = distributed.TCPStore(
            place.address,
            place.port,
            is_master=self._group.Get_rank() == 0,
            timeout=timeout,
            wait_for_workers=False,
            master_listen_fd=place.claim(),
        )
        self._copies = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._slots = [_Slot(device) for _ in range(WINDOW)]
        self._groups = {}
        for root, comm in self._comms.items():
            store = distributed.PrefixStore(f"root-{root}", self._store)
            self._groups[root] = _group(store, comm.Get_rank(), comm.Get_size(), timeout, device)
            # NCCL connects at the first collective: here, where all ranks may wait for each other
            self._groups[root].broadcast(torch.zeros(1, dtype=torch.uint8, device=device), 0).wait()

    def _start(self, root: int, piece: np.ndarray, slot: int) -> Transit:
        return self._slots[slot].start(
            self._groups[root], piece, self._copies, sends=self.root is not None
        )


class _Slot:
    """Room for a piece under way: `host`, pinned, and `staged` on the GPU (`host` itself without
    one), uint8 (PIECE,)."""

    def __init__(self, device: torch.device):
        self._host = torch.empty(PIECE, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self._staged = self._host
        if device.type == "cuda":
            self._staged = torch.empty(PIECE, dtype=torch.uint8, device=device)

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
