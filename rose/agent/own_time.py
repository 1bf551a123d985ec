"""Limits a trajectory's own time: its duration without the waits for the model.

Calls of an environment, and pauses between an agent's requests, have their own deadlines. But an
agent may repeat requests that need no turn, or are refused, for hours, and its group would wait.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from rose.agent.guard import EnvironmentFailure

Result = TypeVar("Result")


class OwnTime:
    """An async context that raises `EnvironmentFailure` after `limit_s` seconds in it, not counting
    time inside `paused`. `key`: the environment's key in the configuration."""

    def __init__(self, trajectory: str, limit_s: float, key: str) -> None:
        self._trajectory, self._left_s, self._limit_s, self._key = trajectory, limit_s, limit_s, key
        self._pauses, self._left = 0, False

    async def __aenter__(self) -> OwnTime:
        self._timeout = asyncio.timeout(self._left_s)
        await self._timeout.__aenter__()
        return self

    async def __aexit__(self, *error: Any) -> None:
        self._left = True
        try:
            await self._timeout.__aexit__(*error)
        except TimeoutError:
            failure = EnvironmentFailure(
                self._trajectory,
                f"it took {self._limit_s:g} s besides the model's turns "
                f"({self._key}.trajectory_timeout_s)",
            )
            failure.made = getattr(error[1], "made", None)
            failure.output = getattr(error[1], "output", "")
            raise failure from None

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Stop the clock. Overlapping pauses count once; a pause after the end has no effect."""
        loop = asyncio.get_running_loop()
        self._pauses += 1
        if self._pauses == 1 and not self._over:
            self._left_s = self._timeout.when() - loop.time()
            self._timeout.reschedule(None)
        try:
            yield
        finally:
            self._pauses -= 1
            if not self._pauses and not self._over:
                self._timeout.reschedule(loop.time() + self._left_s)

    async def waiting(self, other: Awaitable[Result]) -> Result:
        """Await another trajectory with the clock stopped."""
        with self.paused():
            return await other

    @property
    def _over(self) -> bool:
        """True once the context has expired or was left. A sub-agent's turn may end after that."""
        return self._timeout.expired() or self._left
