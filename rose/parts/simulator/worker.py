"""A simulated worker: its engine, its turns, and when it was busy or held its GPUs."""

from __future__ import annotations

import math
from array import array

from rose.parts.simulator import lending, spec
from rose.parts.simulator.drafts import DraftingEngine, Ended
from rose.parts.simulator.engine import SimEngine


class SimWorker:
    __slots__ = (
        "name",
        "pool",
        "serial",
        "engine",
        "pace",
        "budget",
        "offset_s",
        "load",
        "version",
        "turns",
        "ticket",
        "busy_since",
        "spans",
        "held_s",
        "held_since",
        "asked_at",
        "alive",
        "loading",
        "reported",
        "reporting",
    )

    def __init__(self, name: str, pool: spec.Pool, serial: int, now: float, ended: Ended) -> None:
        self.name, self.pool, self.serial = name, pool, serial
        drafts = pool.engine.drafts is not None
        self.engine = DraftingEngine(pool.engine, ended) if drafts else SimEngine(pool.engine)
        self.pace: lending.Pace | None = None  # None: work time equals simulated time
        self.budget: lending.Budget | None = None
        self.load, self.offset_s = None, 0.0  # load of online serving (`spec.Devices.load`)
        self.version = -1
        self.turns: dict[str, object] = {}  # turn in the engine -> its trajectory
        self.ticket = 0  # ticket of the engine's next event in the loop; 0: none
        self.busy_since = -1.0  # -1: not busy
        self.spans = array("d")  # begin, end, begin, ... of the times when it was busy
        self.held_s, self.held_since = 0.0, now
        # Time at which the worker was requested or woken up, until it can take turns; then -1.
        self.asked_at = -1.0
        self.alive, self.loading = True, False
        # (KV tokens, revoked) of the last report to the scheduler
        self.reported = (pool.engine.kv_tokens, False)
        self.reporting = False

    def work(self, now: float) -> float:
        """Return the engine's work time (see `lending.Pace`) at this simulated time."""
        return now if self.pace is None else self.pace.work(now)

    def watch(self, now: float) -> None:
        """Note whether the worker is busy from now on."""
        busy = self.engine.due < math.inf
        if busy and self.busy_since < 0:
            self.busy_since = now
        elif not busy and self.busy_since >= 0:
            self.spans.append(self.busy_since)
            self.spans.append(now)
            self.busy_since = -1.0

    def hold(self, now: float) -> None:
        """Count its GPUs as held from now on."""
        self.held_since = now if self.held_since < 0 else self.held_since

    def end_hold(self, now: float) -> None:
        if self.held_since >= 0:
            self.held_s += now - self.held_since
            self.held_since = -1.0
