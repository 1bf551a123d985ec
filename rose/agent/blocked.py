"""Detect, name and interrupt an environment's method that blocks the event loop of its host.

All trajectories of a host share one event loop, so a method that never awaits stops them all. The
host's process sends a `HostBeat` to its rank every `BEAT_S` seconds while its loop is responsive.
The rank is another process (rose/agent/rank.py). When beats are missing, it sends `SIGNAL`. Python
runs the handler inside the call that blocks, for example a sleep or a regular expression:

1. The handler reports the environment's method. It finds the method on the stack, or in the context
   that an asyncio task inherited from the method which created it.
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

BEAT_S = 1.0  # seconds between two beats; short beside the rank's 30 s, so a few may be late
SIGNAL = signal.SIGRTMIN + 3  # a signal that neither asyncio nor the usual libraries use
# (method, limit in seconds) of the running environment call, inherited by tasks that it starts.
INHERITED: ContextVar[tuple[str, float] | None] = ContextVar("inherited", default=None)
# Functions that call environments; on the stack, their locals `what` and `limit_s` name the call.
CALLS: set[CodeType] = set()


class Blocked(BaseException):
    """Interrupts a method that blocks. The method's handlers would catch an `Exception`."""


def marks(function: Callable) -> Callable:
    """Decorate a function that calls an environment and has the locals `what` and `limit_s`."""
    CALLS.add(function.__code__)
    return function


@marks
def called(what: str, limit_s: float, call: Callable[[], Any]) -> Any:
    """Call a method of the environment that is not a coroutine, such as its constructor."""
    return call()


class LoopWatch:
    """Detects a blocked event loop. `beat` sends one beat, `say` reports the code that blocks."""

    def __init__(self, beat: Callable[[], None], say: Callable[[str], None]) -> None:
        self._beat, self._say = beat, say
        self._beat_at, self._said = time.monotonic(), False

    async def run(self) -> None:
        """Send beats until cancelled. Must run in the main thread, which handles signals."""
        signal.signal(SIGNAL, lambda _, frame: self.look(frame))
        while True:
            self._beat_at, self._said = time.monotonic(), False
            self._beat()
            await asyncio.sleep(BEAT_S)

    def look(self, frame: FrameType | None) -> None:
        """Report once what blocks the loop in `frame`. Raises `Blocked` after its time limit."""
        silent = time.monotonic() - self._beat_at
        if silent < 2 * BEAT_S:
            return  # the loop is responsive again
        where, limit_s = _call(frame)
        if not self._said:
            self._said = True
            self._say(
                f"{where} has blocked the event loop for {silent:.0f} s, so no trajectory of this "
                "host goes on; what blocks belongs into asyncio.to_thread"
            )
        if silent >= limit_s:
            raise Blocked(
                f"blocked the event loop of its host for {silent:.0f} s (step_timeout_s="
                f"{limit_s:g} s); what blocks belongs into asyncio.to_thread"
            )


def _call(frame: FrameType | None) -> tuple[str, float]:
    """Return the environment's method that runs in `frame` or started the task in it, and its
    step_timeout_s. For ROSE's own code: the line, and an infinite limit."""
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
