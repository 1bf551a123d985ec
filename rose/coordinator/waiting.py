"""Waiting of one task for a state that other tasks change. Each wait has a deadline and a text that
names what it waits for."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

SHOW_SILENCE_S = 30.0  # seconds without progress, after which the live display shows the wait
REPORT_SILENCE_S = 60.0  # seconds without progress, after which the wait is reported as a fault
POLL_S = 1.0  # seconds between two checks of the silence while nothing changes
LATE_S = 10.0  # seconds between two checks that show that this process was suspended or very busy


class RunFailed(RuntimeError):
    """Raised when the run can't go on; the message is the cause."""


class Changes:
    """Signals changes of state to the tasks that wait. `show(what)` displays what a task waits
    for."""

    def __init__(self, show: Callable[[str], None]) -> None:
        self._show = show
        self._changed = asyncio.Event()

    def set(self) -> None:
        """Wake every waiting task, so that it checks its state again."""
        self._changed.set()

    async def until(
        self, ready: Callable[[], bool], deadline_s: float, what: Callable[[], str]
    ) -> None:
        """Wait until `ready()`; raise `RunFailed` with `what()` after `deadline_s`."""
        if not await self.within(ready, deadline_s, what):
            raise RunFailed(f"waited {deadline_s:g} s for {what()}")

    async def within(
        self, ready: Callable[[], bool], deadline_s: float, what: Callable[[], str]
    ) -> bool:
        """Wait until `ready()`; return False if it isn't within `deadline_s`."""
        end = time.monotonic() + deadline_s
        while not ready():
            left = end - time.monotonic()
            self._show(what())
            if left <= 0:
                return False
            await self._next(left)
        return True

    async def while_progressing(
        self,
        ready: Callable[[], bool],
        progress: Callable[[], object],
        patience_s: float,
        what: Callable[[], str],
        report: Callable[[str], None],
    ) -> None:
        """Wait until `ready()`, as long as there is progress of any kind.

        The value of `progress()` changes with each progress. In each silence, `report` gets the
        text once, after `REPORT_SILENCE_S`. Raises `RunFailed` after a silence of `patience_s`. If
        this process itself was suspended, the silence is measured from then on.
        """
        reported = shown = False
        last, since = progress(), time.monotonic()
        polled_at = since
        while not ready():
            now, value = time.monotonic(), progress()
            if value != last or now - polled_at > LATE_S:
                last, since = value, now
            polled_at, silent = now, now - since
            if silent > min(SHOW_SILENCE_S, patience_s):
                text = f"no token and no trajectory for {silent:.0f} s while {what()}"
                if silent > patience_s:
                    raise RunFailed(text)
                if silent > REPORT_SILENCE_S and not reported:
                    report(text)
                    reported = True
                self._show(f"progress: {text}")
                shown = True
            elif shown:
                self._show("")
                reported = shown = False
            await self._next(POLL_S)

    async def _next(self, seconds: float) -> None:
        """Wait for the next change, `seconds` at most. The caller then checks its state."""
        self._changed.clear()
        try:
            async with asyncio.timeout(seconds):
                await self._changed.wait()
        except TimeoutError:
            return
