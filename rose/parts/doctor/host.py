"""Run the coordinator's side of a join without a run: only its code for borrowed ranks.

    python -m rose.parts.doctor.host RUN_DIR          RUN_DIR/config.json, as in a run

It is started as a run's ranks are, by mpiexec or srun. So its porters, the processes that accept
joining ranks, start where a coordinator's would. Prints `open`, then every join, first message,
loss and leave. Ends when one rank was lost and one has left, or after `HOST_S`.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from pathlib import Path

from rose import config as configuration
from rose import protocol as p
from rose.comm import join
from rose.config import Config
from rose.coordinator.borrowed import Borrowed
from rose.parts.doctor.finding import emit

HOST_S = 150.0  # seconds: as long as the check may take (`join.JOIN_S`)
FIRST_ADDRESS = 1  # address of the first borrowed rank; this process's own world has rank 0


class Listener:
    """A stand-in for the coordinator's turns, which receive the messages of borrowed ranks."""

    version = 0

    def __init__(self) -> None:
        self.last_seen: dict[str, float] = {}
        self.lost = asyncio.Event()

    def handle(self, _: int, message: p.WorkerLoad | p.WorkerLeft) -> None:
        if message.worker not in self.last_seen:
            emit("received", worker=message.worker)
        self.last_seen[message.worker] = time.monotonic()

    def lose(self, worker: str, _: str) -> int:
        at = self.last_seen.get(worker)
        emit("lost", worker=worker, seconds=None if at is None else time.monotonic() - at)
        self.lost.set()
        return 0


async def host(c: Config, run_dir: Path) -> None:
    """Wait for the ranks that join and leave. Raises the error that ends the coordinator's side."""
    listener, left = Listener(), asyncio.Event()

    def changed(what: str, detail: str) -> None:
        emit(what, worker=detail.partition(":")[0], detail=detail)
        if what == "left":
            left.set()

    def fault(what: str, detail: str) -> None:
        emit("fault", detail=f"{what}: {detail}")

    borrowed = Borrowed(c, run_dir, 1, FIRST_ADDRESS, lambda: listener, fault, changed)
    serving = asyncio.create_task(borrowed.run())
    while join.endpoint(run_dir) is None and not serving.done():
        await asyncio.sleep(0.02)
    emit("open")
    seen = asyncio.gather(listener.lost.wait(), left.wait())
    await asyncio.wait({serving, seen}, timeout=HOST_S, return_when=asyncio.FIRST_COMPLETED)
    if serving.done():
        serving.result()
    serving.cancel()  # the end of the porters, too
    await asyncio.wait({serving})


if __name__ == "__main__":
    directory = Path(sys.argv[1])
    asyncio.run(host(configuration.load(directory / "config.json"), directory))
    sys.stdout.flush()
    os._exit(0)  # no MPI Finalize, which can abort after a peer's death
