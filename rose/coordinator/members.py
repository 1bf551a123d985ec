"""The run's own ranks: which have connected, and which have left."""

from __future__ import annotations

import asyncio
import time

from rose import protocol as p
from rose.comm.mailbox import Mailbox
from rose.config import Config
from rose.coordinator.waiting import Changes
from rose.launch.layout import layout


class Members:
    """The ranks by role, as their `Hello` arrives."""

    def __init__(self, config: Config, mailbox: Mailbox) -> None:
        self._config, self._mailbox = config, mailbox
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

    def lost(self, role: p.Role) -> bool:
        """True if any rank of the role has left or failed."""
        return not self.gone.isdisjoint(self.ranks[role].values())

    async def dismiss(self, reason: str) -> None:
        """Send every rank `Shutdown` and wait until all have left, or a third of
        cluster.stop_timeout_s is over; the launcher ends the remaining ranks."""
        others = set(range(self._mailbox.size)) - {self._mailbox.rank}
        for rank in others:
            self._mailbox.send(rank, p.Shutdown(reason))
        end = time.monotonic() + self._config.cluster.stop_timeout_s / 3
        while self.gone < others and time.monotonic() < end:
            got = self._mailbox.poll()
            if got is None:
                await asyncio.sleep(0.005)
            elif isinstance(got[1], p.Goodbye):
                self.gone.add(got[1].rank)
