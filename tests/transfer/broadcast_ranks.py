"""Real MPI ranks that broadcast; run by test_broadcast.py under mpiexec: `broadcast_ranks.py CASE
FOLDER`.

Rank 0 belongs to no broadcast (a coordinator), then come the roots, then the receivers.
"""

import asyncio
import itertools
import os
import random
import resource
import sys
import time
from pathlib import Path

import numpy as np
from mpi4py import MPI

from rose import protocol as p
from rose.comm import mpi_process
from rose.comm.mailbox import Mailbox
from rose.transfer.broadcast import FRAME_BYTES
from rose.transfer.broadcast_mpi import MpiBroadcast
from rose.transfer.broadcasts import make_broadcast
from rose.transfer.errors import TransferError
from rose.transfer.mirror import Mirror

case, folder = sys.argv[1], Path(sys.argv[2])
world = MPI.COMM_WORLD
mpi_process.unname(world)
box = Mailbox(world)
ours = world.Split(world.Get_rank() > 0)
VERSIONS = 4


def payloads(root: int, version: int) -> list[bytes]:
    """What `root` sends of `version`: sizes of none, of a few bytes, of about a frame and of
    several."""
    rng = np.random.default_rng([root, version])
    sizes = [
        0,
        *rng.integers(1, 3000, 20),
        FRAME_BYTES - 1,
        0,
        FRAME_BYTES,
        1,
        3 * FRAME_BYTES + 17,
        *rng.integers(0, 99, 5),
    ]
    if version == 2:
        sizes = [0] * root  # nothing at all
    return [rng.bytes(size) for size in sizes]


def table(root: int, version: int) -> bytes:
    size = [0, 1, 300, FRAME_BYTES + 5][version]
    return np.random.default_rng([7, root, version]).bytes(size)


def name(version: int) -> str:
    return f"v{version:06d}/from-{version - 1:06d}"


def send(broadcast, root: int) -> None:
    for version in range(VERSIONS):
        for bad in ("../up", "/etc", "a//b", "", "a b"):
            refused(broadcast.begin, bad, f"name is {bad!r}")
        stream = broadcast.begin(name(version))
        refused(broadcast.begin, "next", f"before that of {name(version)!r} is finished")
        for payload in payloads(root, version):
            changing = bytearray(payload)
            stream.send(changing)
            changing[:] = bytes(len(payload))  # the caller's buffer is its own again
            # while the stream's thread is in MPI too
            box.send(0, p.AbortTurn("from a trainer rank", version))
            if random.random() < 0.3:
                time.sleep(0.003)
            box.poll()
        stream.finish(table(root, version))


class Watched(Mirror):
    """Counts the streams that have ended."""

    ended = 0

    def end(self, root: int) -> None:
        super().end(root)
        self.ended += 1


def barrier(comm=ours) -> None:
    """Of the kind that matches the receivers'; leaves the core to others."""
    request = comm.Ibarrier()
    while not request.Test():
        time.sleep(0.002)


async def chat() -> None:
    """With the coordinator, all the time: the mailbox probes and receives on another
    communicator."""
    for number in itertools.count():
        box.send(0, p.AbortTurn(f"t{number}" * (number % 5_000), number))
        _, echo = await box.receive()
        assert echo.turn == f"t{echo.attempt}" * (echo.attempt % 5_000)


def echo() -> None:
    """The coordinator: to its own last barrier."""
    done = world.Ibarrier()
    while not done.Test():
        if (got := box.poll()) is not None:
            box.send(*got)
        time.sleep(0.001)


async def receive(broadcast, mirror: Watched, streams: int) -> None:
    """Until all ranks have what they wait for: each passes frames on."""
    chatting = asyncio.create_task(chat())
    task, all_done = asyncio.create_task(broadcast.receive(mirror)), None
    while not task.done() and not chatting.done() and not (all_done and all_done.Test()):
        if mirror.ended == streams and not all_done:
            all_done = ours.Ibarrier()
        await asyncio.sleep(0.002)
        time.sleep(random.choice([0, 0, 0, 0.02]))  # a loop that has other things to do
    for ended in (task, chatting):
        if ended.done():
            ended.result()
        ended.cancel()


def check(mirror: Mirror, roots: int) -> None:
    for version in range(VERSIONS):
        found = mirror.find(name(version))
        assert (found / "complete").is_file()
        for root in range(roots):
            assert (found / f"rank-{root:05d}.payload").read_bytes() == b"".join(
                payloads(root, version)
            )
            assert (found / f"rank-{root:05d}.table").read_bytes() == table(root, version)


def exchange(kind, roots: int, full: int | None = None) -> None:
    """Every byte at every receiver but `full`, whose memory takes no file of more than a frame."""
    broadcast = make(kind, roots, 30)
    if broadcast.root is not None:
        send(broadcast, broadcast.root)
        barrier()
    else:
        refused(
            broadcast.begin,
            "v1",
            f"rollout rank {broadcast.receiver} can't begin a broadcast of 'v1'",
        )
        mirror = Watched(folder, 1, world.Get_rank(), roots, folder)
        if broadcast.receiver == full:
            resource.setrlimit(resource.RLIMIT_FSIZE, (FRAME_BYTES, FRAME_BYTES))
        asyncio.run(receive(broadcast, mirror, roots * VERSIONS))
        if broadcast.receiver == full:
            assert sorted(mirror.failures) == [name(0), name(1), name(3)], mirror.failures
            assert all("File too large" in why for why in mirror.failures.values())
            assert mirror.find(name(0)) is None and mirror.find(name(2)) is not None
        else:
            check(mirror, roots)
            print(f"identical at receiver {broadcast.receiver}")
        mirror.close()
        assert not mirror.path.exists()


def silent_root() -> None:
    """The second root begins and says no more; what the first one sends still comes, also after the
    error."""
    broadcast = make(MpiBroadcast, 2, 2)
    if broadcast.root == 0:
        send(broadcast, 0)
        barrier()  # the receivers have raised
        broadcast.begin("later").finish(b"")
        barrier()
    elif broadcast.root == 1:
        broadcast.begin("v000009/full").send(bytes(2 * FRAME_BYTES))
        barrier()
        barrier()
    else:
        mirror = Watched(folder, 1, world.Get_rank(), 2, folder)
        try:
            asyncio.run(receive(broadcast, mirror, 99))
        except TransferError as error:
            print(f"receiver {broadcast.receiver} says: {error}")
        assert mirror.ended == VERSIONS
        barrier()
        asyncio.run(receive(broadcast, mirror, VERSIONS + 1))
        mirror.close()


def deaf_receiver() -> None:
    """The last receiver is away: first the rank before it says so, then the root."""
    broadcast = make(MpiBroadcast, 1, 0.5)
    if broadcast.root == 0:
        stream = broadcast.begin("v000001/full")
        try:
            for _ in range(100):
                stream.send(bytes(FRAME_BYTES))
        except TransferError as error:
            print(f"root says: {error}")
    elif broadcast.receiver == 0:
        mirror = Watched(folder, 1, world.Get_rank(), 1, folder)
        try:
            asyncio.run(receive(broadcast, mirror, 1))
        except TransferError as error:
            print(f"receiver 0 says: {error}")
        mirror.close()


def refused(begin, name: str, words: str) -> None:
    try:
        begin(name)
    except TransferError as error:
        assert words in str(error), error
    else:
        raise AssertionError(f"{name!r} was not refused")


def make(kind, roots: int, deadline_s: float):
    ranks = range(1, world.Get_size())
    return kind(world, ranks[:roots], ranks[roots:], deadline_s)


random.seed(world.Get_rank())
match case if world.Get_rank() else "outside":
    case "outside":
        assert make_broadcast("mpi", world, [1], [2], 5) is None
        echo()
    case "exchange":
        exchange(MpiBroadcast, 2, full=1)
    case "gloo":
        from rose.transfer.broadcast_nccl import TorchBroadcast

        exchange(TorchBroadcast, 2)
    case "silent":
        silent_root()
    case "deaf":
        deaf_receiver()
if world.Get_rank():
    barrier(world)
sys.stdout.flush()
os._exit(0)  # as the ranks of a run: MPI_Finalize may abort while frames are under way
