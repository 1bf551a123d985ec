"""The time for which the online engine stops the rollout engine's steps, and its limits."""

from __future__ import annotations

import time
from collections.abc import Sequence

from rose.parts.lending.flag import Flag

# Most seconds of a stop while a call waits for the step, such as to load weights or to abort a
# request. Without a call the limit is lending.patience_s, so that the steps which then run beside a
# busy online engine don't decide its P99.
CALL_S = 0.1
SHUT_S = 1.0  # seconds with the flag up after which the gate counts as shut


class Stopped:
    """The time for which `flag` has stopped an engine's steps without a break. It is read at each
    beat and each time that the gate is asked. `applies` is false for an engine without stops."""

    def __init__(self, flag: Flag, applies: bool) -> None:
        self._flag, self._applies = flag, applies
        self.free_at = time.monotonic()  # when the flag was last known to be down
        self.came_at = self.free_at  # when the first request came to an idle engine
        self._let_go: object = None  # last of the steps that must end though the flag is up

    def seconds(self, since: float = 0.0) -> float:
        """Seconds for which no step could go on, but not from before `since`."""
        now = time.monotonic()
        if not self._applies or not self._flag.up:
            self.free_at = now
        return now - max(self.free_at, since)

    @property
    def shuts(self) -> bool:
        """True if an open gate counts as shut: the steps that it admits stop at the flag."""
        return self.seconds() > SHUT_S

    def exceeds(self, patience_s: float) -> bool:
        """True if requests have waited at stops for more than `patience_s`."""
        return self.seconds(self.came_at) > patience_s

    def must_end(
        self, steps: Sequence[object], runs_since: float, patience_s: float, call_waits: bool
    ) -> bool:
        """True if `steps`, all in flight, must end though the flag is up. The first one has run
        since `runs_since`. Once this is true, it is so until all of them have ended. With
        asynchronous scheduling these are two, and vLLM takes a call after the first, but may carry
        it out only after the second."""
        if not steps or any(step is self._let_go for step in steps):
            return bool(steps)
        called = call_waits and self.seconds(runs_since) > CALL_S
        self._let_go = steps[-1] if called or self.exceeds(patience_s) else None
        return self._let_go is not None
