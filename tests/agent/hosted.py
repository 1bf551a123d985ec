"""An environment host in this process, whose turns a test answers."""

import asyncio

from rose import protocol as p
from rose.agent.host import TrajectoryHost
from rose.comm import wire
from rose.observe.recorder import NullRecorder

DEADLINE_S = 120.0


class Hosted:
    """A `TrajectoryHost`; its messages arrive in `words`."""

    def __init__(self, config, chat, snapshots=None, moves=None, failed=None, checkpoints=None):
        self.words = asyncio.Queue()
        rest = (asyncio.create_task, NullRecorder(), None)
        rest += (snapshots, checkpoints, moves, failed)
        self.host = TrajectoryHost(config, chat, self.send, *rest)
        self.handle = self.host.handle

    def send(self, message):
        # A channel encodes each message too, and refuses one that is too large.
        wire.encode(message)
        self.words.put_nowait(message)

    async def next(self, *kinds):
        """Return the next message of these kinds (none: of any)."""
        while True:
            message = await asyncio.wait_for(self.words.get(), DEADLINE_S)
            if not kinds or isinstance(message, kinds):
                return message

    async def play(self, start, made):
        """Return the messages about one trajectory, whose turns `made(request)` answers."""
        self.handle(start)
        said = [await self.next()]
        while isinstance(said[-1], p.TurnRequest):
            self.handle(made(said[-1]))
            said.append(await self.next())
        return said
