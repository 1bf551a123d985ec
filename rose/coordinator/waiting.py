"""Waits of a task for states that other tasks change: each has a deadline and the name of what it
waits for."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

SILENT_S = 30.0  # seconds without progress from which the user is shown what is waited for
SAID_S = 60.0  # seconds without progress after which a fault says it
LOOK_S = 1.0  # between two looks at a silence that nothing ends


class RunFailed(RuntimeError):
    """The run can't go on; the message is the cause."""


class Changes:
    """`show(what)` shows the user what is waited for."""

    def __init__(self, show: Callable[[str], None]) -> None:
        self._show = show
        self._changed = asyncio.Event()

    def set(self) -> None:
        """Something has changed: who waits looks again."""
        self._changed.set()

    async def until(
        self, ready: Callable[[], bool], deadline_s: float, what: Callable[[], str]
    ) -> None:
        """Raises `RunFailed` with what it waited for."""
        if not await self.within(ready, deadline_s, what):
            raise RunFailed(f"waited {deadline_s:g} s for {what()}")

    async def within(
        self, ready: Callable[[], bool], deadline_s: float, what: Callable[[], str]
    ) -> bool:
        """Whether it became so within the deadline."""
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
        silent_s: Callable[[], float],
        patience_s: float,
        what: Callable[[], str],
        say: Callable[[str], None],
    ) -> None:
        """Wait while there is progress of any kind; only silence has a deadline. `say` gets what is
        waited for once in each silence of `SAID_S`. Raises `RunFailed`."""
        said = shown = False
        while not ready():
            silent = silent_s()
            if silent > min(SILENT_S, patience_s):
                words = f"no token and no trajectory for {silent:.0f} s while {what()}"
                if silent > patience_s:
                    raise RunFailed(words)
                if silent > SAID_S and not said:
                    say(words)
                    said = True
                self._show(f"progress: {words}")
                shown = True
            elif shown:
                self._show("")
                said = shown = False
            await self._next(LOOK_S)

    async def _next(self, seconds: float) -> None:
        """Until the next change, or for so long: the caller's loop decides and says why."""
        self._changed.clear()
        try:
            async with asyncio.timeout(seconds):
                await self._changed.wait()
        except TimeoutError:
            return
