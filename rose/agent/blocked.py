"""Detect, name and interrupt an environment's method that blocks the event loop of its host.

All trajectories of a host share one event loop, so a method that never awaits stops them all. The
host's process sends a `HostBeat` to its rank every `BEAT_S` seconds while its loop is responsive.
The rank is another process (rose/agent/rank.py). When beats are missing, it sends `SIGNAL` to the
host's process. Python runs the signal's handler inside the call that blocks, for example a sleep or
a regular expression:

1. The handler reports the environment's method. It finds the method on the stack. Inside an asyncio
   task that a method has created, it finds the method in the task's context.
2. Once the loop has been blocked for the environment's step_timeout_s, the handler raises `Blocked`
   in the method. That trajectory fails, and all others continue.

Native code that never returns to the interpreter keeps blocking; the rank then kills the process.
"""

from __future__ import annotations

import asyncio
import math
import signal
import time
from collections.abc import Callable
from contextvars import ContextVar
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

BEAT_S = 1.0  # seconds between two beats; the rank waits 30 s, so a few may be late
SIGNAL = signal.SIGRTMIN + 3  # a signal that neither asyncio nor the usual libraries use
# Name and limit in seconds of the environment's method that this asyncio task calls. Tasks that the
# method creates inherit both.
INHERITED: ContextVar[tuple[str, float] | None] = ContextVar("inherited", default=None)
# Code of the functions that `calls_environment` decorates.
CALLS: set[CodeType] = set()


class Blocked(BaseException):
    """Interrupts a method that blocks. It is no `Exception`, since the method might catch that."""


def calls_environment(function: Callable) -> Callable:
    """Decorate a function that calls a method of an environment. In a stack frame of the function,
    the locals `what` and `limit_s` are the method's name and time limit."""
    CALLS.add(function.__code__)
    return function


@calls_environment
def called(what: str, limit_s: float, call: Callable[[], Any]) -> Any:
    """Call a method of the environment that is not a coroutine, such as its constructor. `what`
    names it in reports, and `Blocked` interrupts it after `limit_s` seconds."""
    return call()


class LoopWatch:
    """Detects a blocked event loop. `beat()` sends one beat; `say(text)` reports what blocks."""

    def __init__(self, beat: Callable[[], None], say: Callable[[str], None]) -> None:
        self._beat, self._say = beat, say
        self._beat_at, self._said = time.monotonic(), False

    async def run(self) -> None:
        """Send beats until cancelled. Must run in the main thread, which handles signals."""
        signal.signal(SIGNAL, lambda _, frame: self.on_signal(frame))
        while True:
            self._beat_at, self._said = time.monotonic(), False
            self._beat()
            await asyncio.sleep(BEAT_S)

    def on_signal(self, frame: FrameType | None) -> None:
        """Report once which method blocks the loop; raise `Blocked` in it once its time limit has
        passed. `frame` is the stack frame that the signal interrupted."""
        silent = time.monotonic() - self._beat_at
        responsive_again = silent < 2 * BEAT_S
        if responsive_again:
            return
        where, limit_s = _running_call(frame)
        if not self._said:
            self._said = True
            self._say(
                f"{where} has blocked the event loop for {silent:.0f} s, so no trajectory of this "
                "host goes on; move the blocking code into asyncio.to_thread"
            )
        if silent >= limit_s:
            raise Blocked(
                f"blocked the event loop of its host for {silent:.0f} s (step_timeout_s="
                f"{limit_s:g} s); move the blocking code into asyncio.to_thread"
            )


def _running_call(frame: FrameType | None) -> tuple[str, float]:
    """Return the name and time limit of the environment's method that runs in `frame`, or that
    created the task running there. For ROSE's own code: its place, and an infinite limit."""
    call = frame
    while call is not None and call.f_code not in CALLS:
        call = call.f_back
    if call is not None:
        return call.f_locals["what"], call.f_locals["limit_s"]
    if (inherited := INHERITED.get()) is not None:
        return f"a task of {inherited[0]}", inherited[1]
    return _place(frame), math.inf


def _place(frame: FrameType | None) -> str:
    """Return file, line and function of `frame`."""
    if frame is None:
        return "native code"
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} ({frame.f_code.co_name})"
