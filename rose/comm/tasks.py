"""Asyncio tasks of a rank, none of which may fail unseen."""

from __future__ import annotations

import asyncio
import faulthandler
from collections.abc import Coroutine
from typing import Any

_HUNG_S = 60.0  # longer than any step of a loop that is well
_STDERR = 2


class Tasks:
    """`run_until` ends with the first service that returns or any spawned task that raises."""

    def __init__(self) -> None:
        self._running: set[asyncio.Task] = set()
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def spawn(self, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task:
        task = asyncio.create_task(coroutine)
        self._running.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task) -> None:
        self._running.discard(task)
        if not task.cancelled() and task.exception() is not None and not self._failed.done():
            self._failed.set_exception(task.exception())

    async def run_until(self, *services: Coroutine[Any, Any, Any]) -> None:
        """Run `services` beside the spawned tasks until one returns; raises what any task raised.
        Of a loop that stands still, as inside MPI, the threads' stacks go to standard error."""
        running = [self.spawn(service) for service in (_feed_watchdog(), *services)]
        await asyncio.wait([*running, self._failed], return_when=asyncio.FIRST_COMPLETED)
        if self._failed.done():
            self._failed.result()

    async def close(self, deadline_s: float) -> None:
        """Cancel what still runs and wait for it, at most `deadline_s` seconds."""
        if self._failed.done():
            self._failed.exception()  # raised already, or of no more interest
        left = list(self._running)
        for task in left:
            task.cancel()
        if left:
            await asyncio.wait(left, timeout=deadline_s)


async def _feed_watchdog() -> None:
    """Keep signalling to the process's one watchdog thread that this loop turns."""
    try:
        while True:
            faulthandler.dump_traceback_later(_HUNG_S, file=_STDERR)
            await asyncio.sleep(_HUNG_S / 4)
    finally:
        faulthandler.cancel_dump_traceback_later()
