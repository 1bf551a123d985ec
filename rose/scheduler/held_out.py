"""Evaluation turns on workers: which borrowed worker takes one, and which give way to training."""

from __future__ import annotations

from typing import get_args

from rose.scheduler.events import Borrowed
from rose.scheduler.fleet import Fleet
from rose.scheduler.state import Cluster, TurnState, WorkerState

BORROWED = get_args(Borrowed)


class HeldOut:
    """The turns of evaluations that run."""

    def __init__(self, cluster: Cluster, fleet: Fleet) -> None:
        self._cluster, self._fleet = cluster, fleet
        self._running: dict[str, dict[str, TurnState]] = {}  # worker -> its turns, oldest first

    def __len__(self) -> int:
        return len(self._running)

    def add(self, turn: TurnState) -> None:
        self._running.setdefault(turn.worker, {})[turn.turn] = turn

    def remove(self, turn: TurnState) -> None:
        turns = self._running[turn.worker]
        del turns[turn.turn]
        if not turns:
            del self._running[turn.worker]

    def borrowed(self, turn: TurnState) -> WorkerState | None:
        """A borrowed worker with room for it: where its prefix is cached, else the least loaded."""
        home = self._cluster.workers.get(self._cluster.home.get(turn.trajectory, ""))
        if home is not None and home.kind in BORROWED and self._fleet.get(home.worker, turn):
            return home
        found = (self._fleet.least(turn, kind=kind) for kind in BORROWED)
        return min(filter(None, found), key=lambda worker: worker.load, default=None)

    def in_the_way(self, turn: TurnState, kept: int) -> list[TurnState]:
        """The newest of one worker, as few as make room for `turn`; [] if that doesn't help.
        Workers that could hold a turn of `kept` KV tokens are kept for one."""
        for name in sorted(self._running):
            worker, given = self._cluster.workers[name], []
            if name == turn.avoid or worker.holds >= kept or not self._fleet.is_ready(worker):
                continue
            for other in reversed(self._running[name].values()):
                given.append(other)
                if self._fleet.room_without(worker, given) >= turn.kv_need:
                    return given
        return []
