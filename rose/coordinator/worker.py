"""What the coordinator counts of one engine: its turns, its tokens, and the seconds that it was
busy. Left out: what the scheduler decides by (rose/scheduler/fleet.py)."""

from __future__ import annotations

from dataclasses import dataclass

from rose.scheduler.events import Kind

POOLS = ("dedicated", "hybrid", "borrowed")  # what workers are to a run


@dataclass
class Worker:
    rank: int
    incarnation: int
    version: int
    kind: Kind = "dedicated"
    alive: bool = True
    tokens: int = 0  # received from it since `begin_step`
    total_tokens: int = 0
    running: int = 0
    waiting: int = 0
    open_turns: int = 0
    failed_loads: int = 0  # of the newest version
    _busy_s: float = 0.0  # with at least one turn, since `begin_step`, up to `_busy_since`
    _busy_since: float = 0.0

    @property
    def borrowed(self) -> bool:
        return self.kind not in ("dedicated", "hybrid")

    @property
    def pool(self) -> str:
        """dedicated, hybrid or borrowed."""
        return "borrowed" if self.borrowed else self.kind

    def turn_opened(self, at: float) -> None:
        if self.open_turns == 0:
            self._busy_since = at
        self.open_turns += 1

    def turn_closed(self, at: float, turns: int = 1) -> None:
        self._busy_s = self.busy_s(at)
        self._busy_since = at
        self.open_turns -= turns

    def busy_s(self, at: float) -> float:
        """Seconds with at least one turn, since `begin_step`."""
        return self._busy_s + (at - self._busy_since if self.open_turns else 0.0)

    def begin_step(self, at: float) -> None:
        """Turns may run on from the step before."""
        self.tokens, self._busy_s, self._busy_since = 0, 0.0, at

    def restarts(self, before: Worker) -> None:
        """What its earlier process did in this step still counts."""
        self.tokens, self.total_tokens, self._busy_s = (
            before.tokens,
            before.total_tokens,
            before._busy_s,
        )
