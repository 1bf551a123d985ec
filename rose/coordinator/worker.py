"""The coordinator's counters of one engine: its turns, its tokens, and its busy seconds.

The state that the scheduler decides by is in rose/scheduler/fleet.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from rose.scheduler.events import Kind

POOLS = ("dedicated", "hybrid", "borrowed")  # groups of workers in the metrics


@dataclass
class Worker:
    """Counters of one engine process. A restarted engine gets a new `Worker`, with the next
    incarnation."""

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
    failed_loads: int = 0  # failed attempts to load the newest version
    _busy_s: float = 0.0  # seconds with at least one turn, from `begin_step` to `_busy_since`
    _busy_since: float = 0.0  # wall-clock seconds

    @property
    def borrowed(self) -> bool:
        return self.kind not in ("dedicated", "hybrid")

    @property
    def pool(self) -> str:
        """The element of `POOLS` that the worker counts in."""
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
        """Return the seconds since `begin_step` in which the engine had at least one turn."""
        return self._busy_s + (at - self._busy_since if self.open_turns else 0.0)

    def begin_step(self, at: float) -> None:
        """Reset the step's counters; turns of the step before may still run."""
        self.tokens = 0
        self._busy_s = 0.0
        self._busy_since = at

    def continue_counts_of(self, before: Worker) -> None:
        """Take over the counts of the engine's process before its restart."""
        self.tokens = before.tokens
        self.total_tokens = before.total_tokens
        self._busy_s = before._busy_s
