"""Trajectories that move from this environment host to another: what the host tells so that the
scheduler can decide, and when one may leave.

It leaves while it waits for a turn and a snapshot of all before it is on disk, so that no command
is cut or made again. Left out: the turn, which stays with its engine, and the start elsewhere
(rose/coordinator/groups.py).
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

import psutil

from rose import protocol as p
from rose.agent.envs.base import Environment
from rose.agent.snapshots import Snapshot

LOOK_S, LOOKS = 0.5, 4  # between two looks at the load; so many make a report


class Moves:
    """Of the host of rank `rank`; `send` takes its messages to the coordinator."""

    def __init__(self, rank: int, send: Callable[[p.Message], None]) -> None:
        self.rank, self._send = rank, send
        self._running: dict[str, Environment] = {}
        self._saved: dict[str, int] = {}  # turns of the newest snapshot that others can read
        self._asked: set[str] = set()  # to leave

    def begin(self, trajectory: str, environment: Environment) -> None:
        self._running[trajectory] = environment

    def end(self, trajectory: str) -> None:
        self._running.pop(trajectory, None)
        self._saved.pop(trajectory, None)
        self._asked.discard(trajectory)

    def ask(self, trajectory: str) -> None:
        """It shall leave."""
        self._asked.add(trajectory)

    def leaves_before(self, trajectory: str) -> str | None:
        """The turn for which it must wait to leave now; None: it stays."""
        if trajectory not in self._asked or trajectory not in self._saved:
            return None
        return f"{trajectory}.t{self._saved[trajectory]}"

    async def saved(self, snapshot: Snapshot) -> bool:
        """A snapshot is on disk: it is told once what it names is where other hosts find it, if
        that comes about."""
        trajectory = snapshot.start.id
        settled = getattr(self._running.get(trajectory), "settled", None)
        if settled is not None and not await settled():
            return False
        if trajectory not in self._running:
            return False
        self._saved[trajectory] = snapshot.turns
        seconds = snapshot.state["commands_s"]
        self._send(p.TrajectorySaved(self.rank, trajectory, snapshot.turns, seconds))
        return True

    async def tell_load(self) -> None:
        """Until it is cancelled. The load is the machine's: whoever makes it slows commands."""
        while True:
            cores, tasks = float(len(os.sched_getaffinity(0))), 0
            for _ in range(LOOKS):
                await asyncio.sleep(LOOK_S)
                tasks += _runnable()
            memory = psutil.virtual_memory().percent / 100
            load = p.HostLoad(self.rank, len(self._running), cores, tasks / LOOKS, memory)
            self._send(load)


def _runnable() -> int:
    """Tasks of the machine that run or could run, this one aside."""
    return int(Path("/proc/loadavg").read_text(encoding="utf-8").split()[3].partition("/")[0]) - 1
