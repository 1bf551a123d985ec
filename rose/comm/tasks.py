"""Run a rank's asyncio tasks so that none of them fails unseen."""

from __future__ import annotations

import asyncio
import faulthandler
from collections.abc import Coroutine
from typing import Any

# Seconds after which a blocked event loop counts as hung. Healthy callbacks are shorter.
_HUNG_S = 60.0
_STDERR = 2


class Tasks:
    """An event loop's tasks. `run_until` ends when a service returns or any spawned task raises."""

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
        """Run `services` beside the spawned tasks until a service returns. Raise the first
        exception of any task. If a call blocks the loop, write all threads' stacks to stderr."""
        running = [self.spawn(service) for service in (_feed_watchdog(), *services)]
        await asyncio.wait([*running, self._failed], return_when=asyncio.FIRST_COMPLETED)
        if self._failed.done():
            self._failed.result()

    async def close(self, deadline_s: float) -> None:
        """Cancel the tasks that still run and wait for them, at most `deadline_s` seconds."""
        if self._failed.done():
            self._failed.exception()  # retrieved, so that asyncio does not log it
        left = list(self._running)
        for task in left:
            task.cancel()
        if left:
            await asyncio.wait(left, timeout=deadline_s)


async def _feed_watchdog() -> None:
    """Restart faulthandler's timer, the only one of a process, while this event loop runs."""
    try:
        while True:
            faulthandler.dump_traceback_later(_HUNG_S, file=_STDERR)
            await asyncio.sleep(_HUNG_S / 4)
    finally:
        faulthandler.cancel_dump_traceback_later()
