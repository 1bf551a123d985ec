"""Evaluation turns: which borrowed worker takes one, and which are preempted for training turns."""

from __future__ import annotations

from typing import get_args

from rose.scheduler.events import Borrowed
from rose.scheduler.fleet import Fleet
from rose.scheduler.state import Cluster, TurnState, WorkerState

BORROWED = get_args(Borrowed)


class HeldOut:
    """The evaluation turns that run on workers; `len` is the number of workers with such turns."""

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
        """Return a borrowed worker with room for the turn: the one with its prefix cached, else
        the least loaded; None if none has room."""
        home = self._cluster.workers.get(self._cluster.home.get(turn.trajectory, ""))
        if home is not None and home.kind in BORROWED and self._fleet.get(home.worker, turn):
            return home
        found = (self._fleet.least(turn, kind=kind) for kind in BORROWED)
        return min(filter(None, found), key=lambda worker: worker.load, default=None)

    def to_preempt(self, turn: TurnState, reserved_for: int) -> list[TurnState]:
        """Return the newest evaluation turns of one worker, as few as make room for `turn`; [] if
        no worker has enough. Workers that could hold a turn of `reserved_for` KV tokens are left
        out, because they are reserved for such a turn."""
        for name in sorted(self._running):
            worker, preempted = self._cluster.workers[name], []
            if name == turn.avoid or worker.largest_turn >= reserved_for:
                continue
            if not self._fleet.is_ready(worker):
                continue
            for other in reversed(self._running[name].values()):
                preempted.append(other)
                if self._fleet.room_without(worker, preempted) >= turn.kv_need:
                    return preempted
        return []
