"""Ports for programs that can't say which one they have bound."""

import os
import random
import socket
from pathlib import Path

RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_draw = random.Random(os.getpid())
_claims: list[socket.socket] = []


def free_port() -> int:
    """One of loopback that nobody has, below those that the system gives to whoever connects or
    binds port 0, and that no other call of this gives away while this process lives: nobody takes
    it before its program does."""
    first = int(RANGE.read_text().split()[0])
    # below 18500, where slurm/dev_cluster.sh has its own; where the system gives all ports away,
    # any of the upper ones is as good as another
    low, high = (10_000, min(first, 18_000)) if first > 11_000 else (20_000, 60_000)
    while True:
        port = _draw.randrange(low, high)
        claim = socket.socket(socket.AF_UNIX)
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                claim.bind(f"\0rose-tests-port-{port}")  # a name without a file
                probe.bind(("127.0.0.1", port))
            except OSError:
                claim.close()
                continue
        _claims.append(claim)
        return port
