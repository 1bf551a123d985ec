"""Where a rank can be reached by its peers: for the rendezvous of torch.distributed."""

from __future__ import annotations

import socket

from mpi4py import MPI


def rendezvous(peers: MPI.Comm) -> str:
    """``address:port`` of a free port on this rank: loopback when all `peers` share its node, else the
    address that the host's own name resolves to. Collective over `peers`."""
    node = peers.Split_type(MPI.COMM_TYPE_SHARED)
    alone = node.Get_size() == peers.Get_size()
    node.Free()
    address = "127.0.0.1" if alone else socket.gethostbyname(socket.gethostname())
    with socket.socket() as probe:
        probe.bind((address, 0))
        return f"{address}:{probe.getsockname()[1]}"
