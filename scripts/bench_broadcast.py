"""One trainer rank's file to 1, 2, 4 rollout ranks over MPI: ours against a plain Bcast and against
N Sends.

    python scripts/bench_broadcast.py                    # 64 MiB in payloads of 700 kB, best of 3
    python scripts/bench_broadcast.py --mib 256 --encode-ms 5

Starts its own ranks with mpiexec on this machine. Between payloads the root computes for
`--encode-ms` (zstd, which leaves the GIL), as an encoder would; then the whole is sent. Seconds are
the root's, from the first payload's encoding until the last receiver has every byte; `blocked` is
what of them the root spent inside of the transport. Bcast and Send receivers block in MPI; ours
poll from an event loop and write to a mirror in /dev/shm, each as a node of its own. Left out:
other machines' networks, GPUs.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

PAYLOAD = 700_000  # bytes
CONF = Path(__file__).resolve().parents[1] / "conf"


class Encoder:
    """Makes payloads at the cost of `milliseconds` of computing each."""

    def __init__(self, milliseconds: float, total: int) -> None:
        import zstandard

        self.payloads = [np.random.default_rng(7).bytes(PAYLOAD)] * (total // PAYLOAD)
        self._compress = zstandard.ZstdCompressor(level=1).compress
        self._work = np.random.default_rng(1).integers(0, 4, 1 << 18, dtype=np.uint8).tobytes()
        self._times = round(milliseconds / 1000 / min(self._once() for _ in range(20)))

    def _once(self) -> float:
        began = time.perf_counter()
        self._compress(self._work)
        return time.perf_counter() - began

    def __iter__(self):
        for payload in self.payloads:
            for _ in range(self._times):
                self._compress(self._work)
            yield payload


def rank_main(arguments) -> None:
    from mpi4py import MPI

    from rose.comm import mpi_process
    from rose.transfer.broadcast import Broadcast
    from rose.transfer.mirror import SHARED_MEMORY

    world = MPI.COMM_WORLD
    mpi_process.unname(world)
    rank, receivers = world.Get_rank(), world.Get_size() - 1
    total = (arguments.mib << 20) // PAYLOAD * PAYLOAD
    memory = SHARED_MEMORY / f"rose-bench-{os.getpid()}"  # of a node of its own
    memory.mkdir()
    broadcast = Broadcast(
        world, [0], range(1, receivers + 1), 60, Path.cwd(), 2 * total, folder=memory
    )
    loop = asyncio.new_event_loop()
    receiving = loop.create_task(broadcast.receive())  # for as long as the rank lives
    encoder = Encoder(arguments.encode_ms, total) if rank == 0 else None
    whole = np.empty(total, np.uint8)

    def encode() -> None:
        for number, payload in enumerate(encoder):
            whole[number * PAYLOAD : (number + 1) * PAYLOAD] = np.frombuffer(payload, np.uint8)

    def ours(edge: str) -> float:
        if rank:
            loop.run_until_complete(_receive(broadcast, edge, world))
            return 0.0
        encode()
        began = time.perf_counter()
        broadcast.send(f"{edge}/rank-00000.h5", whole)
        blocked = time.perf_counter() - began
        _wait(world.Ibarrier())
        return blocked

    def at_once(transport) -> float:
        if rank == 0:
            encode()
        began = time.perf_counter()
        transport()
        blocked = time.perf_counter() - began
        _wait(world.Ibarrier())
        return blocked

    def sends() -> None:
        if rank:
            world.Recv([whole, MPI.BYTE], 0)
        else:
            for receiver in range(1, receivers + 1):
                world.Send([whole, MPI.BYTE], receiver)

    ways = {
        "ours": ours,
        "Bcast": lambda _: at_once(lambda: world.Bcast([whole, MPI.BYTE])),
        "Sends": lambda _: at_once(sends),
    }
    best = {way: (np.inf, np.inf) for way in ways}
    for repeat in range(arguments.repeats):
        for way, run in ways.items():
            world.Barrier()
            began = time.perf_counter()
            blocked = run(f"v{repeat:06d}/full")
            best[way] = min(best[way], (time.perf_counter() - began, blocked))
    if rank == 0:
        for way, (seconds, blocked) in best.items():
            print(
                f"{receivers:9d} {way:7} {total / seconds / 1e6:7.0f} {seconds:8.3f} "
                f"{blocked:8.3f} {seconds / best['ours'][0]:9.2f} "
                f"{blocked / best['ours'][1]:9.2f}",
                flush=True,
            )
    receiving.cancel()
    broadcast.close()
    memory.rmdir()
    world.Barrier()
    os._exit(0)


async def _receive(broadcast, edge: str, world) -> None:
    path = broadcast.mirror.path / edge / "rank-00000.h5"
    while not path.exists():
        await asyncio.sleep(0.001)
    done = world.Ibarrier()
    while not done.Test():
        await asyncio.sleep(0.001)


def _wait(request) -> None:
    while not request.Test():
        time.sleep(0.0005)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mib", type=int, default=64)
    parser.add_argument("--encode-ms", type=float, default=3.0, help="of computing per payload")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--receivers", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank:
        rank_main(arguments)
    from rose.launch.local import MPIEXEC_OPTIONS, find_mpiexec

    mpi = yaml.safe_load((CONF / "cluster/mpi/mpich_wheel.yaml").read_text())["env"]
    print("receivers way        MB/s  seconds  blocked  /ours: seconds and blocked", flush=True)
    for receivers in arguments.receivers:
        command = [
            find_mpiexec(),
            *MPIEXEC_OPTIONS,
            "-n",
            str(receivers + 1),
            sys.executable,
            *sys.argv,
            "--rank",
        ]
        done = subprocess.run(command, env=os.environ | mpi | {"OMP_NUM_THREADS": "1"}, timeout=300)
        if done.returncode:
            return done.returncode
    return 0


if __name__ == "__main__":
    sys.exit(main())
