"""The broadcast that a run's configuration names (transfer.broadcast)."""

from __future__ import annotations

from collections.abc import Sequence

from rose.transfer.broadcast import Broadcast
from rose.transfer.errors import TransferError


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
