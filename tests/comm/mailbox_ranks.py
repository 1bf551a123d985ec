"""Three real MPI ranks exchange messages of many sizes: mailbox_ranks.py FOLDER; run by
test_mailbox.py under mpiexec."""

import asyncio
import functools
import os
import sys
import time
from pathlib import Path

from mpi4py import MPI

from rose import protocol as p
from rose.comm import address, mpi_process
from rose.comm.mailbox import Mailbox, gather_texts, share_text, split_by_role

SIZES = [0, 1, 1000, 65_500, 65_536, 100_000, 3_000_000]
BURST = 1000  # messages that all lie there before the first is taken
sent = Path(sys.argv[1]) / "sent"  # a file that says so


async def serve(box: Mailbox, count: int) -> None:
    for _ in range(count):
        source, message = await asyncio.wait_for(box.receive(), 120)
        box.send(source, message)
    assert box.flush(60)


def ask(box: Mailbox) -> None:
    for number, size in enumerate(SIZES):
        box.send(0, p.TurnResult(f"t{number}", bytes(size), b"", b"", p.FinishReason.STOP))
    for number, size in enumerate(SIZES):
        source, message = box.receive_blocking(120, "an echo")
        assert (source, message.turn, len(message.tokens)) == (0, f"t{number}", size)


def take_burst(box: Mailbox) -> None:
    """No pause between two messages that are both here: MPI denies each of them once, as it takes
    it in."""
    world.Barrier()
    while not sent.exists():  # they come, and MPI isn't asked
        time.sleep(0.01)
    pauses = 0
    for number in range(BURST):
        while (got := box.poll()) is None:
            pauses += number > 0
            time.sleep(0.001)
        assert got[1].turn == f"b{number}"
    assert pauses < BURST / 10, f"{pauses} pauses in a burst of {BURST} messages"
    world.Barrier()


def give_burst(box: Mailbox) -> None:
    world.Barrier()
    if box.rank == 1:
        for number in range(BURST):
            box.send(0, p.AbortTurn(f"b{number}", 1))
        assert box.flush(60)
        sent.touch()
    world.Barrier()


world = MPI.COMM_WORLD
found = mpi_process.unlink_shared(world)
assert any(world.allgather(found)), "no shared memory was found: has MPICH changed its name?"
assert not [name for names in world.allgather(found) for name in names if os.path.exists(name)]
box = Mailbox(world)
text = "résumé/step-1"
assert share_text(world, text if box.rank == 0 else None, 120.0, "the test's text") == text
peers = split_by_role(world, p.Role.COORDINATOR if box.rank == 0 else p.Role.TRAINER)
assert peers.Get_size() == (1 if box.rank == 0 else 2)
gather = functools.partial(gather_texts, peers, deadline_s=120.0, what="the test's addresses")
assert gather("é" * (1 + peers.Get_rank())) == [
    "é" * (1 + rank) for rank in range(peers.Get_size())
]
place = address.meet(lambda text: gather(text), peers.Get_rank())
assert place.address == "127.0.0.1" and (place.listener is None) == (peers.Get_rank() > 0)
if box.rank == 0:
    take_burst(box)
    asyncio.run(serve(box, 2 * len(SIZES)))
else:
    give_burst(box)
    ask(box)
    try:
        box.receive_blocking(0.2, "a word that never comes")
    except TimeoutError as error:
        print(error)
box.close()
MPI.Finalize()
sys.exit(0)
