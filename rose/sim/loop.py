"""Simulated time: a heap of calls. What is due at the same time is done in the order in which it
was asked for."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any


class Loop:
    def __init__(self) -> None:
        self.now = 0.0
        self.events = 0  # calls made
        self.over = False  # set by a call: no other is made
        self._heap: list[tuple[float, int, Callable[..., None], Any]] = []
        self._count = 0

    def at(self, time: float, call: Callable[..., None], what: Any) -> int:
        """`call(what, ticket)` at `time` (now, if that has passed). Returns the ticket, unique and
        ascending: a caller that asks anew and remembers the newest ticket knows that a call with
        another one is void."""
        self._count += 1
        heapq.heappush(self._heap, (time if time > self.now else self.now, self._count, call, what))
        return self._count

    def run(self, horizon_s: float) -> None:
        """Until it is `over`. Raises `RuntimeError` when nothing is due any more, or `horizon_s`
        has passed, before."""
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
