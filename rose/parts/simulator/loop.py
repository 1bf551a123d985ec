"""The event loop of simulated time: a heap of calls. Calls that are due at the same time are made
in the order in which they were scheduled."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any


class Loop:
    def __init__(self) -> None:
        self.now = 0.0
        self.events = 0  # number of calls made
        self.over = False  # set by a call to end the loop
        self._heap: list[tuple[float, int, Callable[..., None], Any]] = []
        self._count = 0

    def at(self, time: float, call: Callable[..., None], what: Any) -> int:
        """Schedule `call(what, ticket)` at `time`, or now if that has passed, and return the
        ticket. A caller that reschedules keeps the newest ticket and ignores calls with an older
        one."""
        self._count += 1
        heapq.heappush(self._heap, (time if time > self.now else self.now, self._count, call, what))
        return self._count

    def run(self, horizon_s: float) -> None:
        """Make the calls until `over` is set. Raises `RuntimeError` if no call is left, or
        `horizon_s` has passed, before that."""
        heap, pop, count = self._heap, heapq.heappop, 0
        try:
            while not self.over:
                if not heap:
                    raise RuntimeError(
                        f"at {self.now:.1f} s of simulated time nothing is due any more"
                    )
                self.now, ticket, call, what = pop(heap)
                if self.now > horizon_s:
                    raise RuntimeError(
                        f"not over after horizon_s={horizon_s:g} s of simulated time"
                    )
                count += 1
                call(what, ticket)
        finally:
            self.events += count
