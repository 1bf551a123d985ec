"""Moves of trajectories from this environment host to another. The host reports its load and its
trajectories' snapshots, from which the scheduler decides on moves.

A trajectory leaves while it waits for a turn, and only if its snapshot before that turn is on disk.
So no command is interrupted or repeated. Meanwhile the engine continues the turn. The coordinator
starts the trajectory on the new host (rose/coordinator/groups.py).
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

LOAD_SAMPLE_S = 0.5  # seconds between two samples of the machine's load
SAMPLES = 4  # samples per report, which makes a report every two seconds


class Moves:
    """The moves of the host with rank `rank`. `send` sends a message to the coordinator."""

    def __init__(self, rank: int, send: Callable[[p.Message], None]) -> None:
        self.rank, self._send = rank, send
        self._running: dict[str, Environment] = {}
        self._saved: dict[str, int] = {}  # turns in the newest snapshot that other hosts can read
        self._to_move: set[str] = set()  # trajectories that the coordinator wants to move

    def begin(self, trajectory: str, environment: Environment) -> None:
        self._running[trajectory] = environment

    def end(self, trajectory: str) -> None:
        self._running.pop(trajectory, None)
        self._saved.pop(trajectory, None)
        self._to_move.discard(trajectory)

    def request_move(self, trajectory: str) -> None:
        """Move the trajectory to another host as soon as a snapshot allows."""
        self._to_move.add(trajectory)

    def leaves_before(self, trajectory: str) -> str | None:
        """Return the turn that follows the newest snapshot. The trajectory may leave while it waits
        for this turn. Return None if it shall not move, or has no snapshot yet."""
        if trajectory not in self._to_move or trajectory not in self._saved:
            return None
        return f"{trajectory}.t{self._saved[trajectory]}"

    async def saved(self, snapshot: Snapshot) -> bool:
        """Report a snapshot that is on disk, once other hosts can read the environment's state for
        it. Return True if it was reported; False if other hosts can't use it, or if the trajectory
        has ended meanwhile."""
        trajectory = snapshot.start.id
        settled = getattr(self._running.get(trajectory), "settled", None)
        if settled is not None and not await settled():
            return False
        if trajectory not in self._running:
            return False
        self._saved[trajectory] = snapshot.turns
        seconds = snapshot.state.commands_s
        self._send(p.TrajectorySaved(self.rank, trajectory, snapshot.turns, seconds))
        return True

    async def report_load(self) -> None:
        """Report the whole machine's load until cancelled. Threads of all jobs on the machine are
        counted, because they slow commands; so all its cores are reported, not this job's share."""
        cores = float(os.cpu_count() or 1)
        while True:
            tasks = 0
            for _ in range(SAMPLES):
                await asyncio.sleep(LOAD_SAMPLE_S)
                tasks += _runnable()
            memory = psutil.virtual_memory().percent / 100
            load = p.HostLoad(self.rank, len(self._running), cores, tasks / SAMPLES, memory)
            self._send(load)


def _runnable() -> int:
    """Return the number of runnable threads of the machine, without the calling thread."""
    return int(Path("/proc/loadavg").read_text(encoding="utf-8").split()[3].partition("/")[0]) - 1
