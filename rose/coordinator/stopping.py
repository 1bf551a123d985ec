"""A stop that comes while a step is trained: until the step's end nothing can be saved, as weights
and optimizer states are neither those of one step nor of the next, so the end is waited for where
it comes soon enough.

How much of the time to stop that may take is `rose.launch.resume.step_end_s`.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from rose.coordinator.waiting import Changes

LAST = 3  # steps whose training tells how long the next one's takes


class StepEnd:
    """Told when the training of a step begins, and when every rank has applied it: a run that
    stops doesn't wait until engines have the weights."""

    def __init__(self, changed: Changes) -> None:
        self._changed = changed
        self._began: float | None = None  # monotonic; null: no step is trained now
        self._took: deque[float] = deque(maxlen=LAST)

    def begins(self) -> None:
        self._began = time.monotonic()

    def ended(self) -> None:
        self._took.append(time.monotonic() - self._began)
        self._began = None

    def left_s(self) -> float:
        """Seconds until the end, if this step takes as long as the longest of the last ones; 0
        where it has taken longer already, is over, or is the first, so that nobody knows."""
        if self._began is None:
            return 0.0
        return max(0.0, max(self._took, default=0.0) - (time.monotonic() - self._began))

    async def wait(self, step: int, over: Callable[[], bool], limit_s: float) -> None:
        """Until `step` is `over`, for `limit_s` at most; not at all where it would take longer.
        Says which."""
        if (left_s := self.left_s()) > limit_s:
            print(
                f"asked to end: step {step} is trained for some {left_s:.0f} s more, and "
                f"{limit_s:.0f} s may be waited (cluster.stop_timeout_s), so it is not saved",
                flush=True,
            )
            return
        print(
            f"asked to end: step {step} is waited for, {limit_s:.0f} s at most, and saved",
            flush=True,
        )
        await self._changed.within(over, limit_s, lambda: "the step's end, to save it and stop")
