"""Calls an environment's methods with deadlines. Every fault of the environment, including a hang,
becomes an `EnvironmentFailure`."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable, Coroutine
from typing import Any

from rose.agent import returned
from rose.agent.blocked import INHERITED, Blocked, called, calls_environment
from rose.agent.envs import _workers
from rose.agent.envs.base import Action, Environment, Start, Step
from rose.protocol import Trajectory
from rose.reward import values

CAUSE_CHARACTERS = 4000  # most characters of a cause, which may quote 2,000 bytes of a log
POLL_S = 0.1  # least seconds between two checks of a deadline, which moves while a call is queued


class EnvironmentFailure(Exception):
    """The environment raised, hung or returned invalid values; the trajectory must not be trained.

    The trajectory so far is kept for inspection. The agent loop sets `made` on every exception that
    leaves a trajectory, cancellations included, because `OwnTime` turns a cancellation at its limit
    into this failure. The runner of an agent's program also sets `output`.
    """

    def __init__(self, trajectory: str, cause: str):
        # A cause quotes foreign text of any length, which may have lone surrogates (invalid UTF-8).
        cause = cause[:CAUSE_CHARACTERS].encode("utf-8", "backslashreplace").decode()
        super().__init__(f"trajectory {trajectory}: {cause}")
        self.trajectory, self.cause = trajectory, cause
        self.task = ""  # the environment's name for its task, if any
        self.made: Trajectory | None = None  # the trajectory so far; None without any token
        self.output = ""  # text that the agent's program had printed


class TaskFailure(EnvironmentFailure):
    """Every trajectory of the task would fail the same way, such as with a prompt too long."""


class ScoringFailure(EnvironmentFailure):
    """The episode was played to its end, but could not be scored."""


class Interrupted(KeyboardInterrupt):
    """Raised, with the signal's number, by the handler of a signal that ends this process. If it
    interrupts a call of an environment, the environment is not at fault."""


class Guard:
    """Calls the methods of `env`, each with a deadline of `timeout_s` seconds. The time that a call
    waits for a free worker process (`_workers`) doesn't count. `key` is the environment's key in
    the configuration, for messages. Raises `EnvironmentFailure`."""

    def __init__(self, env: Environment, trajectory: str, timeout_s: float, key: str):
        self.env, self.trajectory, self.timeout_s, self.key = env, trajectory, timeout_s, key

    async def reset(self, seed: int) -> Start:
        return await self._call("reset", lambda: self.env.reset(seed), Start, returned.start)

    async def step(self, action: Action) -> Step:
        return await self._call("step", lambda: self.env.step(action), Step, returned.step)

    async def end(self) -> Step | None:
        """Return the environment's verdict on an episode that a limit ended; None without `end`."""
        if (end := getattr(self.env, "end", None)) is None:
            return None
        return await self._call("end", end, Step, returned.step)

    def stats(self) -> dict[str, float]:
        """Return the environment's own statistics of the episode."""
        return self._read("stats", {}, returned.stats)

    def flag(self, name: str) -> bool:
        """Return the environment's attribute `name`, True or False; False without it."""
        return self._read(name, None, returned.flag)

    def _read(self, name: str, default: Any, check: Callable[[Any], Any]) -> Any:
        """Read an attribute and check it. It may be a property, whose code may raise or block."""
        what = f"{type(self.env).__name__}.{name}"
        try:
            given = called(what, self.timeout_s, lambda: getattr(self.env, name, default))
        except Interrupted:
            raise
        except (Exception, Blocked, SystemExit, KeyboardInterrupt) as error:
            raise self._failure(name, f"raised {_raised(error)}") from error
        try:
            return check(given)
        except Exception as error:
            raise self._failure(name, f"gave {_wrong(error)}") from error

    async def checkpoint(self) -> bytes | None:
        """Save the environment's state and return it; None without the method `checkpoint`."""
        if (checkpoint := getattr(self.env, "checkpoint", None)) is None:
            return None
        return await self._call("checkpoint", checkpoint, bytes)

    async def resume(self, saved: bytes) -> None:
        await self._call("resume", lambda: self.env.resume(saved), object)

    async def close(self) -> None:
        await self._call("close", self.env.close, object)

    async def _call(
        self,
        name: str,
        make: Callable[[], Coroutine],
        expected: type,
        check: Callable[[Any], Any] = lambda value: value,
    ) -> Any:
        """Await `make()`, a call of the environment's method `name`, within the deadline. Return
        `check(result)`. Raises `EnvironmentFailure`, also if the result isn't `expected`."""
        began = time.monotonic()
        with _workers.Queueing() as queue:
            what = f"{type(self.env).__name__}.{name}"
            task = asyncio.ensure_future(_awaited(what, self.timeout_s, make))
        task.add_done_callback(forget)
        # asyncio.wait_for would wait for an environment that swallows its cancellation.
        try:
            left = self.timeout_s
            while not task.done() and left > 0:
                await asyncio.wait({task}, timeout=max(left, POLL_S))
                left = self.timeout_s - (time.monotonic() - began - queue.seconds)
        finally:
            task.cancel()
        if not task.done():
            raise self._failure(
                name, f"did not return within {self.key}.step_timeout_s={self.timeout_s:g} s"
            )
        error = asyncio.CancelledError("by itself") if task.cancelled() else task.exception()
        if isinstance(error, Blocked):
            raise self._failure(name, str(error)) from error
        if error is not None:
            raise self._failure(name, f"raised {_raised(error)}") from error
        if not isinstance(task.result(), expected):
            given = values.shown(task.result())
            raise self._failure(name, f"returned {given}, not a {expected.__name__}")
        try:
            return check(task.result())
        except Exception as error:
            raise self._failure(name, f"gave {_wrong(error)}") from error

    def _failure(self, method: str, what: str) -> EnvironmentFailure:
        return EnvironmentFailure(self.trajectory, f"{type(self.env).__name__}.{method} {what}")


@calls_environment
async def _awaited(what: str, limit_s: float, make: Callable[[], Coroutine]) -> Any:
    """Await `make()`. SystemExit and KeyboardInterrupt, which would end this process, become a
    RuntimeError, but not `Interrupted`, with which a signal ends it."""
    INHERITED.set((what, limit_s))
    try:
        if not inspect.isawaitable(given := make()):
            raise TypeError("it is no coroutine: write `async def`")
        return await given
    except Interrupted:
        raise
    except (SystemExit, KeyboardInterrupt) as error:  # errors with which asyncio ends the host
        raise RuntimeError(f"it tried to end its process by {error!r}") from error


def _wrong(error: Exception) -> str:
    """Return why a check failed: its ValueError's text, or another exception of a user's class."""
    if type(error) is ValueError:
        return str(error)
    return f"a value that can't be read: {_raised(error)}"


def _raised(error: BaseException) -> str:
    """Return the error's repr, or the name of its type if `repr` raises."""
    try:
        return repr(error)
    except Exception:
        return type(error).__name__


def forget(task: asyncio.Task) -> None:
    """Retrieve the exception of a call that is no longer awaited, so asyncio doesn't log it."""
    if not task.cancelled():
        task.exception()
