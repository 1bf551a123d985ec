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
    # below those of `cluster_ports`; where the system gives all ports away, any of the upper ones
    # is as good as another
    low, high = (10_000, min(first, 18_000)) if first > 11_000 else (20_000, 60_000)
    while True:
        port = _draw.randrange(low, high)
        if _claimed(f"port-{port}", port):
            return port


def cluster_ports() -> int:
    """The first of 130 ports for a slurm/dev_cluster.sh of this process, which no other call and no
    test run of another user or checkout has."""
    blocks = range(18_500, 30_000, 200)
    # Its controller and its accounting daemon listen at these offsets.
    return next(each for each in blocks if _claimed(f"cluster-{each}", each + 17, each + 19))


def _claimed(name: str, *ports: int) -> bool:
    """True if the name was nobody's and the ports are free; if so, the name is this process's."""
    claim = socket.socket(socket.AF_UNIX)
    try:
        claim.bind(f"\0rose-tests-{name}")  # a name without a file
        for port in ports:
            with socket.socket() as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(("127.0.0.1", port))
    except OSError:
        claim.close()
        return False
    _claims.append(claim)
    return True
