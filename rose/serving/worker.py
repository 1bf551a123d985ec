"""The rollout worker of a borrowed rank: it may leave at any time, and outlives its coordinator."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Coroutine

from rose import protocol as p
from rose.comm.link import Link
from rose.comm.mailbox import COORDINATOR
from rose.comm.wire import decode, encode
from rose.config import Config
from rose.observe.recorder import NullRecorder
from rose.roles.rollout import RolloutWorker

FIRST_PAUSE_S = 0.0002
GOODBYE_S = 2.0  # the coordinator's, so that no last word of ours is lost in a closing connection
RUN_SILENT_S = 30.0  # the coordinator may be busy for seconds, and then still be there


class Wire:
    """A link as a mailbox: one peer, the coordinator."""

    def __init__(self, link: Link, idle_pause_s: float = 0.002) -> None:
        self._link, self._idle_pause_s, self._pause_s = link, idle_pause_s, FIRST_PAUSE_S
        self._looked_at = time.monotonic()

    def send(self, _: int, message: p.Message) -> None:
        self._link.send(encode(message))

    async def receive(self) -> tuple[int, p.Message]:
        while (data := self._link.take()) is None:
            self._looked_at = time.monotonic()
            await asyncio.sleep(self._pause_s)
            self._pause_s = min(self._pause_s * 1.5, self._idle_pause_s)
        self._pause_s = FIRST_PAUSE_S
        return COORDINATOR, decode(data)

    def silent_s(self) -> float:
        """For how long nothing had come when it was last seen that nothing is here."""
        return max(0.0, self._looked_at - self._link.heard_at)


class BorrowedWorker(RolloutWorker):
    """A rollout worker that may leave, and outlives its coordinator."""

    def __init__(self, config: Config, name: str, recorder: NullRecorder) -> None:
        super().__init__(config, name, None, recorder)
        self.heartbeat_s = config.serving.heartbeat_s
        self.over = ""  # why the run is over for this rank
        self._asked_to_leave: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def ask_to_leave(self, number: int) -> None:
        """By a signal: SIGUSR2 politely, any other at once; a second one: at once."""
        if not self._asked_to_leave.done():
            self._asked_to_leave.set_result(number)
        else:
            self._drain_until = 0.0

    @property
    def asked_to_leave(self) -> bool:
        return self._asked_to_leave.done() and not self._asked_to_leave.cancelled()

    def _services(self) -> list[Coroutine]:
        return [*super()._services(), self._watch_run(), self._leave()]

    def _hear(self, message: p.Message) -> None:
        if not isinstance(message, p.Heartbeat):
            super()._hear(message)

    async def _watch_run(self) -> None:
        """Ends when the coordinator has been silent for too long."""
        while self.mailbox.silent_s() < RUN_SILENT_S:
            await asyncio.sleep(1.0)
        self.over = f"the run has been silent for {RUN_SILENT_S:g} s"

    async def _leave(self) -> None:
        number = await self._asked_to_leave
        reason = f"asked by {signal.Signals(number).name}"
        self._drain_until = time.monotonic() + (self.config.serving.drain_s if number == signal.SIGUSR2 else 0.0)
        self._hands_back = True
        self._send(p.WorkerLeaving(self.name, self.incarnation, reason))
        while self._turns and time.monotonic() < self._drain_until:
            await asyncio.sleep(0.02)
        for task in list(self._turns.values()):
            task.cancel()
        await asyncio.sleep(0)  # they send what they have
        self._send(p.WorkerLeft(self.name, self.incarnation, reason))
        await asyncio.sleep(GOODBYE_S)  # Shutdown, the answer, ends the worker before this
