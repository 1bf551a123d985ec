"""Time the broadcast of one trainer rank's file to 1, 2, 4 rollout ranks against a plain MPI Bcast.

    python scripts/bench_broadcast.py --mib 64 --repeats 3 --receivers 1 2 4

Starts its own ranks with mpiexec on this machine. Seconds are the root's, until the last receiver
has every byte; `blocked` is the part that the root spent inside the transport. All are the best of
`--repeats`. Receivers of a Bcast block in MPI. Receivers of ROSE's broadcast poll from an event
loop and write to a mirror in /dev/shm, each as if it were alone on its node. Left out: networks
between machines, GPUs.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.harness import configured

DEADLINE_S = 300


def rank_main(mib: int, repeats: int) -> None:
    from mpi4py import MPI

    from rose.comm import mpi_process
    from rose.transfer.broadcast import Broadcast
    from rose.transfer.mirror import SHARED_MEMORY

    world = MPI.COMM_WORLD
    mpi_process.unlink_shared(world)
    rank, receivers = world.Get_rank(), world.Get_size() - 1
    whole = np.random.default_rng(7).integers(0, 256, mib << 20, dtype=np.uint8)
    # Each rank has its own mirror folder, as if it were alone on its node.
    memory = SHARED_MEMORY / f"rose-bench-{os.getpid()}"
    memory.mkdir()
    rollouts = range(1, receivers + 1)
    limit = 2 * whole.size
    broadcast = Broadcast(world, [0], rollouts, 60, Path.cwd(), limit, folder=memory)
    loop = asyncio.new_event_loop()
    receiving = loop.create_task(broadcast.receive())  # running as long as the rank lives

    def ours(edge: str) -> None:
        if rank == 0:
            broadcast.send(f"{edge}/rank-00000.h5", whole)

    def plain(edge: str) -> None:
        world.Bcast([whole, MPI.BYTE])

    def once(way: Callable[[str], None], edge: str) -> tuple[float, float]:
        """Return seconds until all ranks have the file, and seconds that this rank was blocked."""
        world.Barrier()
        began = time.perf_counter()
        way(edge)
        blocked = time.perf_counter() - began
        if way is ours and rank:
            path = broadcast.mirror.path / edge / "rank-00000.h5"
            loop.run_until_complete(_until(path.exists))
        loop.run_until_complete(_until(world.Ibarrier().Test))
        return time.perf_counter() - began, blocked

    found = [[once(way, f"v{n:06d}/full") for n in range(repeats)] for way in (ours, plain)]
    if rank == 0:
        (mine, blocked), (bcast, _) = (map(min, zip(*each, strict=True)) for each in found)
        print(
            f"{receivers:9d} {1e3 * blocked:12.1f} {mine:10.3f} {bcast:10.3f} {mine / bcast:6.2f}",
            flush=True,
        )
    receiving.cancel()
    broadcast.close()
    memory.rmdir()
    world.Barrier()
    os._exit(0)


async def _until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.0005)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mib", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--receivers", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank:
        rank_main(arguments.mib, arguments.repeats)
    from rose.launch.local import MPIEXEC

    env = os.environ | configured().cluster.mpi.env | {"OMP_NUM_THREADS": "1"}
    print("receivers  blocked, ms    ours, s   Bcast, s   ours / Bcast", flush=True)
    for receivers in arguments.receivers:
        ranks = [*MPIEXEC, "-n", str(receivers + 1)]
        command = [*ranks, sys.executable, *sys.argv, "--rank"]
        code = subprocess.run(command, env=env, timeout=DEADLINE_S).returncode
        if code:
            return code
    return 0


if __name__ == "__main__":
    sys.exit(main())
