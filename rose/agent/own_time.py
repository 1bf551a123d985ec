"""The bound on a trajectory's own time: all that it takes but its waits for the model.

Each call of an environment has a deadline, and each silence of an agent. But an agent that calls
again and again what costs no turn, or is refused, would go on for hours, and its group with it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from rose.agent.guard import EnvironmentFailure

Result = TypeVar("Result")


class OwnTime:
    """An async context that ends with an `EnvironmentFailure` once `limit_s` seconds have passed in
    it that no `paused` covers. `key`: where the limit stands in the configuration."""

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
        """While a turn is waited for. Several at once count once; after the end none counts."""
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
        """Await another trajectory, whose turns are no time of this one's."""
        with self.paused():
            return await other

    @property
    def _over(self) -> bool:
        """Expired, or left: a sub-agent's turn may outlast its trajectory."""
        return self._timeout.expired() or self._left
