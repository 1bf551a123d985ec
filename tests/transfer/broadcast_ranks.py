"""Real MPI ranks that broadcast; run by test_broadcast.py under mpiexec: `broadcast_ranks.py CASE
FOLDER`.

Rank 0 belongs to no broadcast (a coordinator), then come the trainer ranks, then the rollout ranks.
Each rollout rank is a node of its own, with a folder for its memory, but in the case "shared".
"""

import asyncio
import itertools
import os
import random
import re
import resource
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from mpi4py import MPI

from rose import protocol as p
from rose.comm import mpi_process
from rose.comm.mailbox import Mailbox
from rose.transfer import mirror as mirrors
from rose.transfer.broadcast import PIECE, WINDOW, Broadcast, make_broadcast
from rose.transfer.errors import TransferError
from rose.transfer.store import edge_name

case, folder = sys.argv[1], Path(sys.argv[2])
world = MPI.COMM_WORLD
mpi_process.unlink_shared(world)
box = Mailbox(world)
ours = world.Split(world.Get_rank() > 0)
VERSIONS = 4
LIMIT = 64 << 20


def content(root: int, version: int) -> bytes:
    """Files of a few bytes, of about a piece and of more than are under way at once."""
    sizes = [1, 3000, PIECE - 1, (WINDOW + 1) * PIECE + 17]
    return np.random.default_rng([root, version]).bytes(sizes[(version + root) % VERSIONS])


def name(version: int, root: int) -> str:
    return f"{edge_name(version, version - 1)}/rank-{root:05d}.h5"


def send(broadcast: Broadcast) -> None:
    """All versions; each once the receivers have the one before."""
    for bad in ("../up", "/etc", "a//b", "", "a b", "x" * 200):
        with pytest.raises(TransferError, match=re.escape(f"name is {bad!r}")):
            broadcast.send(bad, b"x")
    for version in range(VERSIONS):
        broadcast.send(name(version, broadcast.root), content(broadcast.root, version))
        box.send(0, p.AbortTurn("while the thread is in MPI", version))
        barrier()


def barrier(comm=ours) -> None:
    """Of the kind that matches the receivers'; leaves the core to others."""
    request = comm.Ibarrier()
    while not request.Test():
        time.sleep(0.002)


async def chat() -> None:
    """With the coordinator, all the time: the mailbox receives on another communicator."""
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


async def receive(broadcast: Broadcast, roots: int, refused: tuple[int, ...] = ()) -> None:
    tasks = [asyncio.create_task(chat()), asyncio.create_task(broadcast.receive())]
    for version in range(VERSIONS):
        why = await broadcast.mirror.wait(edge_name(version, version - 1))
        assert bool(why) == (version in refused), (version, why)
        for root in range(roots if not why else 0):
            path = broadcast.mirror.path / name(version, root)
            assert path.read_bytes() == content(root, version)
        if why:
            assert "File too large" in why or "its limit is" in why, why
        all_done = ours.Ibarrier()
        while not all_done.Test():
            await asyncio.sleep(0.002)
            time.sleep(random.choice([0, 0, 0, 0.02]))  # a loop that has other things to do
    for task in tasks:
        assert not task.done(), task.result()
        task.cancel()


def exchange(roots: int, shared: bool = False, over_torch: bool = False) -> None:
    """Every byte at every rollout rank; the memory of the second takes no file of over a piece."""
    full = None if shared else 1
    broadcast = make(roots, 60, shared)
    if over_torch:
        import torch

        broadcast.use_torch(torch.device("cpu"))
    if broadcast.root is not None:
        send(broadcast)
        return
    index = world.Get_rank() - 1 - roots
    assert broadcast.writes == (not shared or index == 0)
    if index == full:
        resource.setrlimit(resource.RLIMIT_FSIZE, (PIECE, PIECE))
    # with two trainer ranks the large file is one of these versions'
    asyncio.run(receive(broadcast, roots, (2, 3) if index == full else ()))
    print(f"identical at rollout {index}", flush=True)
    broadcast.close()
    assert shared or not broadcast.mirror.path.exists()


def deaf_receiver() -> None:
    """The last rollout rank is away: neither the trainer rank nor the others wait for ever. When
    they have given up it comes, and MPI moves the pieces that they had posted."""
    broadcast = make(1, 2)
    away = world.Get_rank() == world.Get_size() - 1
    if broadcast.root is not None:
        broadcast.send(name(1, 0), b"x" * (64 * PIECE))
        broadcast.send(name(2, 0), b"waits, in its thread, for the first to be given up")
        assert not broadcast._failed, "the trainer goes on"
        broadcast.catch_up()
        broadcast.send(name(3, 0), b"at once: nobody hears it")
    elif not away:
        asyncio.run(give_up(broadcast))
        broadcast.close()
    barrier()
    if away:
        broadcast.deadline_s = 60
        asyncio.run(come_late(broadcast))
        broadcast.close()


async def come_late(broadcast: Broadcast) -> None:
    """The pieces that the trainer rank had posted arrive, with their bytes."""
    task, end = asyncio.create_task(broadcast.receive()), time.monotonic() + 120
    posted, found = b"x" * (WINDOW * PIECE), b""
    while found != posted:
        assert time.monotonic() < end, f"{found.count(b'x')} of {len(posted)} bytes came"
        await asyncio.sleep(0.05)
        for path in broadcast.mirror.path.glob("v*/*/.rank-*"):
            found = path.read_bytes()[: len(posted)]
    print("the late one has what was posted", flush=True)
    task.cancel()


async def give_up(broadcast: Broadcast) -> None:
    task = asyncio.create_task(broadcast.receive())
    why = await broadcast.mirror.wait(edge_name(1, 0))
    print(f"rollout says: {why}", flush=True)
    assert not task.done() and not list(broadcast.mirror.path.glob("v*"))
    assert await broadcast.mirror.wait(edge_name(2, 1)) == why  # at once
    task.cancel()


def make(roots: int, deadline_s: float, shared: bool = False) -> Broadcast:
    ranks = range(1, world.Get_size())
    memory = folder if shared else folder / str(world.Get_rank())
    memory.mkdir(exist_ok=True)
    return Broadcast(world, ranks[:roots], ranks[roots:], deadline_s, folder, LIMIT, folder=memory)


mirrors.BEGINS_S = mirrors.ARRIVES_S = 60.0  # nobody says here when a version was published
random.seed(world.Get_rank())
match case if world.Get_rank() else "outside":
    case "outside":
        assert make_broadcast("mpi", world, [1], [2], 5, folder, LIMIT) is None
        echo()
    case "exchange":
        exchange(2)
    case "shared":
        exchange(2, shared=True)
    case "gloo":
        exchange(2, over_torch=True)
    case "deaf":
        LIMIT = 1 << 30
        deaf_receiver()
if world.Get_rank():
    barrier(world)
sys.stdout.flush()
os._exit(0)  # as the ranks of a run: MPI_Finalize may abort while pieces are under way
