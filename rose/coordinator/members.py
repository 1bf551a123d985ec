"""The run's own ranks: which have connected, and which have left."""

from __future__ import annotations

import asyncio
import time

from rose import protocol as p
from rose.comm.mailbox import Mailbox
from rose.config import Config
from rose.coordinator.waiting import Changes, RunFailed
from rose.launch.layout import layout


class Members:
    """The ranks by role, as their `Hello` arrives."""

    def __init__(self, config: Config, mailbox: Mailbox) -> None:
        self._config, self._mailbox, self.send = config, mailbox, mailbox.send
        # role -> index -> rank
        self.ranks: dict[p.Role, dict[int, int]] = {role: {} for role in p.Role}
        self.gone: set[int] = set()  # ranks that have left or failed
        planned = [rank.role for rank in layout(config)]
        roles = [role for role in p.Role if role is not p.Role.COORDINATOR]
        self.wanted = {role: planned.count(role) for role in roles}

    async def connected(self, changes: Changes) -> None:
        """Wait until every rank has connected."""

        def missing() -> str:
            counts = [f"{r.value} {len(self.ranks[r])} of {n}" for r, n in self.wanted.items()]
            return f"ranks to connect: {', '.join(counts)}"

        await changes.until(
            lambda: all(len(self.ranks[role]) >= n for role, n in self.wanted.items()),
            self._config.cluster.start_timeout_s,
            missing,
        )

    def handle(self, source: int, message: p.Message) -> bool:
        """Handle a message about a rank's life; return False for any other. Raises `RunFailed` if
        the rank has failed."""
        match message:
            case p.Hello():
                self.ranks[message.role][message.index] = source
            case p.Goodbye():
                self.gone.add(message.rank)
            case p.RankFailed():
                self.gone.add(message.rank)
                raise RunFailed(f"rank {message.rank}: {message.error}")
            case _:
                return False
        return True

    def lost(self, role: p.Role) -> bool:
        """True if any rank of the role has left or failed."""
        return not self.gone.isdisjoint(self.ranks[role].values())

    async def dismiss(self, reason: str) -> None:
        """Send every rank `Shutdown` and wait until all have left, or a third of
        cluster.stop_timeout_s is over; the launcher ends the remaining ranks."""
        others = set(range(self._mailbox.size)) - {self._mailbox.rank}
        for rank in others:
            self.send(rank, p.Shutdown(reason))
        end = time.monotonic() + self._config.cluster.stop_timeout_s / 3
        while self.gone < others and time.monotonic() < end:
            got = self._mailbox.poll()
            if got is None:
                await asyncio.sleep(0.005)
            elif isinstance(got[1], p.Goodbye):
                self.gone.add(got[1].rank)
