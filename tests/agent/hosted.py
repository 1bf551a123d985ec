"""An environment host in this process, whose turns a test answers."""

import asyncio

from rose import protocol as p
from rose.agent.host import TrajectoryHost
from rose.observe.recorder import NullRecorder

DEADLINE_S = 120.0


class Hosted:
    """A `TrajectoryHost`; its messages arrive in `words`."""

    def __init__(self, config, chat, snapshots=None, moves=None, failed=None, checkpoints=None):
        self.words = asyncio.Queue()
        rest = (asyncio.create_task, NullRecorder(), None)
        rest += (snapshots, checkpoints, moves, failed)
        self.host = TrajectoryHost(config, chat, self.words.put_nowait, *rest)
        self.handle = self.host.handle

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
