"""Three real MPI ranks exchange messages of many sizes; run by test_mailbox.py under mpiexec."""

import asyncio
import sys

from mpi4py import MPI

from rose import protocol as p
from rose.comm.address import rendezvous
from rose.comm.mailbox import Mailbox, share_text, split_by_role

SIZES = [0, 1, 1000, 100_000, 3_000_000]


async def serve(box: Mailbox, count: int) -> None:
    for _ in range(count):
        source, message = await asyncio.wait_for(box.receive(), 30)
        box.send(source, message)
    assert box.flush(10)


def ask(box: Mailbox) -> None:
    for number, size in enumerate(SIZES):
        box.send(0, p.TurnResult(f"t{number}", bytes(size), b"", b"", p.FinishReason.STOP))
    for number, size in enumerate(SIZES):
        source, message = box.receive_blocking(30, "an echo")
        assert (source, message.turn, len(message.tokens)) == (0, f"t{number}", size)


world = MPI.COMM_WORLD
box = Mailbox(world)
assert share_text(world, "résumé/step-1" if box.rank == 0 else None) == "résumé/step-1"
peers = split_by_role(world, p.Role.COORDINATOR if box.rank == 0 else p.Role.TRAINER)
assert peers.Get_size() == (1 if box.rank == 0 else 2)
assert rendezvous(peers).startswith("127.0.0.1:")
if box.rank == 0:
    asyncio.run(serve(box, 2 * len(SIZES)))
else:
    ask(box)
    try:
        box.receive_blocking(0.2, "a word that never comes")
    except TimeoutError as error:
        print(error)
MPI.Finalize()
sys.exit(0)
