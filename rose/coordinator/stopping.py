"""A stop that arrives while a step is trained.

Nothing can be saved before the step's end, because weights and optimizer states belong neither to
the last step nor to the next. So the run waits for the step's end if it is expected soon enough.
`rose.launch.resume.step_end_s` says how long the run may wait.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from rose.coordinator.waiting import Changes

RECENT_STEPS = 3  # steps, the longest of which predicts how long the next one's training takes


class StepEnd:
    """Predicts and awaits the end of the step that is being trained: when every trainer rank has
    applied it. A run that stops does not wait for engines to load the weights."""

    def __init__(self, changed: Changes) -> None:
        self._changed = changed
        self._began: float | None = None  # monotonic seconds; None: no step is being trained
        self._took: deque[float] = deque(maxlen=RECENT_STEPS)  # seconds

    def training_began(self) -> None:
        self._began = time.monotonic()

    def training_ended(self) -> None:
        self._took.append(time.monotonic() - self._began)
        self._began = None

    def left_s(self) -> float:
        """Return the seconds until the step's end, if it takes as long as the longest recent one; 0
        if it has taken longer, if no step is trained, and for the attempt's first step."""
        if self._began is None:
            return 0.0
        return max(0.0, max(self._took, default=0.0) - (time.monotonic() - self._began))

    async def wait(self, step: int, over: Callable[[], bool], limit_s: float) -> None:
        """Wait until `over()`, for `limit_s` at most; return at once if `step` is predicted to take
        longer. Prints which."""
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
