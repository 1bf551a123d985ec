"""Check and time an all-reduce between the GPUs of this node.

    python -m rose.parts.doctor.all_reduce BACKEND RANKS          BACKEND: nccl, a GPU per rank; gloo, in main memory

Emits {"what": "all-reduce", "gib_per_s": ...}: the bus bandwidth as in nccl-tests, which is
2 (n - 1) / n bytes / seconds for n ranks. For any n it is comparable with the links' speed. Left
out: several nodes.
"""  # noqa: E501

from __future__ import annotations

import sys
import tempfile
import time
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing

from rose.parts.doctor.finding import emit

FLOATS = 2**24  # values that are reduced: 64 MiB
ROUNDS = 5  # all-reduces that are timed
TIMEOUT = timedelta(seconds=30)  # limit for the rendezvous and for each collective


def main(backend: str, ranks: int) -> None:
    if backend == "nccl" and (seen := torch.cuda.device_count()) < ranks:
        sys.exit(f"torch sees {seen} GPUs of {ranks}: no build for CUDA, or none for this driver")
    with tempfile.TemporaryDirectory(prefix="rose-doctor-") as folder:
        rendezvous = f"{folder}/rendezvous"  # a file, since another process could take a port
        torch.multiprocessing.spawn(_rank, (ranks, backend, rendezvous), nprocs=ranks)


def _rank(rank: int, ranks: int, backend: str, rendezvous: str) -> None:
    """Run one rank of the all-reduce. Raises `RuntimeError` if the sum is wrong."""
    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        backend, init_method=f"file://{rendezvous}", rank=rank, world_size=ranks, timeout=TIMEOUT
    )
    values = torch.full((FLOATS,), rank + 1.0, device=device)
    dist.all_reduce(values)  # not timed, since the first one makes the connections
    wanted = ranks * (ranks + 1) / 2
    if not bool((values == wanted).all()):
        found = f"{values.min().item()} to {values.max().item()}"
        raise RuntimeError(f"rank {rank}: the sum is {found}, not {wanted}")
    values.zero_()
    dist.barrier()
    began = time.monotonic()
    for _ in range(ROUNDS):
        dist.all_reduce(values)
    values.sum().item()  # a wait for the device
    seconds = time.monotonic() - began
    if rank == 0:
        emit(
            "all-reduce", gib_per_s=2 * (ranks - 1) / ranks * 4 * FLOATS * ROUNDS / seconds / 2**30
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
