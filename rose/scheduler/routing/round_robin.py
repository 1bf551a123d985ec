"""Each worker in turn."""

from __future__ import annotations

from rose.scheduler.fleet import Fleet
from rose.scheduler.state import Cluster, TurnState, WorkerState


class RoundRobin:
    """The next worker by name that has room, whatever its load; the baseline of most frameworks."""

    def __init__(self) -> None:
        self._last = ""

    def choose(self, turn: TurnState, fleet: Fleet, cluster: Cluster) -> WorkerState | None:
        worker = fleet.after(self._last, turn)
        if worker is not None:
            self._last = worker.worker
        return worker
