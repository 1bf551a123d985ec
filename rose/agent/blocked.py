"""An environment that blocks the event loop of its host: noticed, named and ended.

All trajectories of a host share one event loop, so a method that never awaits stops them all. The
host's process sends a `HostBeat` to its rank each `BEAT_S`, as long as its loop turns. The rank is
another process (rose/agent/rank.py), and where beats stay away it sends `SIGNAL`. The handler runs
within the very call that blocks, be it a sleep or a regular expression:

1. it reports the environment's method, which it finds among the frames below, or by the context
   that a task of the method has inherited;
2. once the loop stood still for the environment's step_timeout_s, it raises `Blocked` in the
   method: that trajectory fails, and all others go on.

Native code that handles no signals goes on blocking; the rank ends its process.
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

BEAT_S = 1.0  # seconds between two beats: a rank that counts to 30 s may miss some
SIGNAL = signal.SIGRTMIN + 3  # neither asyncio nor what environments use needs it
# (what, limit_s) of the environment call whose task runs, or has started the task that does.
INHERITED: ContextVar[tuple[str, float] | None] = ContextVar("inherited", default=None)
CALLS: set[CodeType] = set()  # functions whose locals `what` and `limit_s` tell an environment call


class Blocked(BaseException):
    """Raised in a method that blocks. `Exception` would end in the method's own handlers."""


def marks(function: Callable) -> Callable:
    """A decorator: calls of the environment lie within this function."""
    CALLS.add(function.__code__)
    return function


@marks
def called(what: str, limit_s: float, call: Callable[[], Any]) -> Any:
    """Call a method of the environment that is no coroutine, as its constructor."""
    return call()


class LoopWatch:
    """`beat` sends a sign of life, `say` a sentence about what blocks."""

    def __init__(self, beat: Callable[[], None], say: Callable[[str], None]) -> None:
        self._beat, self._say = beat, say
        self._beat_at, self._said = time.monotonic(), False

    async def run(self) -> None:
        """Send beats until cancelled. In the main thread."""
        signal.signal(SIGNAL, lambda _, frame: self.look(frame))
        while True:
            self._beat_at, self._said = time.monotonic(), False
            self._beat()
            await asyncio.sleep(BEAT_S)

    def look(self, frame: FrameType | None) -> None:
        """Report what blocks the loop in `frame`. Raises `Blocked` where its time is up."""
        silent = time.monotonic() - self._beat_at
        if silent < 2 * BEAT_S:
            return  # The loop turns again.
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
    """The environment's method that runs in `frame`, or one of whose tasks does, and its
    step_timeout_s; ROSE's own code has no limit."""
    call = frame
    while call is not None and call.f_code not in CALLS:
        call = call.f_back
    if call is not None:
        return call.f_locals["what"], call.f_locals["limit_s"]
    if (inherited := INHERITED.get()) is not None:
        return f"a task of {inherited[0]}", inherited[1]
    return _place(frame), math.inf


def _place(frame: FrameType | None) -> str:
    """Name the line of ROSE's own code."""
    if frame is None:
        return "native code"
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} ({frame.f_code.co_name})"
