"""Three real MPI ranks: 0 floods 2 with words of many sizes while 1 broadcasts to it as often as is
asked: traffic_ranks.py BROADCASTS; run by test_mailbox.py, and for longer by `make soak`.

A mailbox that probed lost a frame of the broadcast within a few thousand of them, and the run stood
still.
"""

import asyncio
import os
import random
import sys
import time
from pathlib import Path

import numpy as np
from mpi4py import MPI

from rose import protocol as p
from rose.comm import mpi_process
from rose.comm.mailbox import Mailbox
from rose.transfer.broadcast import make_broadcast
from rose.transfer.mirror import Mirror

BROADCASTS = int(sys.argv[1])
DEADLINE_S = 60.0 + BROADCASTS / 10  # a hundred a second come on a machine that is free


def payload(number: int) -> bytes:
    rng = np.random.default_rng(number)
    return rng.bytes(int(rng.integers(1000, 400_000)))


class Compare(Mirror):
    """Checks each file, and counts them."""

    ended = 0

    def finish(self, name):
        super().finish(name)
        assert name == f"v{self.ended}/full/rank-00000.h5"
        assert (self.path / name).read_bytes() == payload(self.ended)
        self.ended += 1


async def flood():
    """Until all broadcasts are sent."""
    draw, sent = random.Random(1), 0
    echoes = asyncio.ensure_future(swallow())
    while not echoes.done():
        for _ in range(draw.randrange(1, 20)):
            box.send(2, p.AbortTurn("t" * draw.choice([10, 300, 2000, 9000, 30_000]), sent))
            sent += 1
        await asyncio.sleep(draw.random() * 0.01)
    echoes.result()
    box.send(2, p.Shutdown(str(sent)))
    assert box.flush(DEADLINE_S)


async def swallow():
    """Echoes of rank 2, until rank 1 says that it is done."""
    async with asyncio.timeout(DEADLINE_S):
        while not isinstance((await box.receive())[1], p.Shutdown):
            pass


def publish():
    draw = random.Random(2)
    for number in range(BROADCASTS):
        broadcast.send(f"v{number}/full/rank-00000.h5", payload(number))
        time.sleep(draw.random() * 0.02)
    broadcast._last.join(DEADLINE_S)  # the thread of the last one, behind all others
    assert not broadcast._last.is_alive()
    for to in (0, 2):
        box.send(to, p.Shutdown(str(BROADCASTS)))
    assert box.flush(DEADLINE_S)


async def listen():
    """To the last word of both others, which say how much there was of each."""
    words, said = 0, {}
    while len(said) < 2:
        source, message = await box.receive()
        if isinstance(message, p.Shutdown):
            said[source] = int(message.reason)
            continue
        assert message.attempt == words
        words += 1
        if words % 5 == 0:
            box.send(0, message)
    assert words == said[0]
    while broadcast.mirror.ended < said[1]:
        await asyncio.sleep(0.01)


async def take_all():
    frames = asyncio.ensure_future(broadcast.receive())
    words = asyncio.ensure_future(listen())
    await asyncio.wait([frames, words], return_when="FIRST_COMPLETED", timeout=DEADLINE_S)
    if frames.done():
        frames.result()
    assert words.done(), f"words or frames are missing: {broadcast.mirror.ended} broadcasts came"
    words.result()
    frames.cancel()


world = MPI.COMM_WORLD
mpi_process.unlink_shared(world)
rank = world.Get_rank()
box, run_dir = Mailbox(world), Path(f"traffic-{os.getppid()}")
broadcast = make_broadcast("mpi", world, [1], [2], DEADLINE_S, run_dir, 1 << 30) if rank else None
if rank == 0:
    asyncio.run(flood())
elif rank == 1:
    publish()
else:
    broadcast.mirror = Compare(broadcast.mirror.path, 1, 1 << 30)
    asyncio.run(take_all())
    broadcast.close()
    print(broadcast.mirror.ended, "broadcasts taken", flush=True)
world.Barrier()
os._exit(0)  # as the ranks of a run: receives are still posted
