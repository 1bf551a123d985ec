"""Worker processes for functions that may block or hang, or that run on the policy's text.

A worker process computes one call at a time. If a call exceeds its limit or is cancelled (such as
by the agent loop's deadline), its process is killed. The next call starts another process.
Arguments and results are lines of JSON (the argument `episode` may be an `Episode`). The processes
end with the environment host. They aren't sandboxed: the functions are the user's own code.
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import msgspec

from rose import processes
from rose.reward import function, values
from rose.reward.episode import Episode

MOST = 4  # most processes of an environment host, each with up to a few hundred MB of libraries
SAID = 2000  # most characters of a function's error
BEGUN = b"begun\n"  # a worker's first line for a call, once the function is imported
_own = threading.local()  # `_own.worker`: the process of this thread of the pool


class Queueing:
    """Measures how long calls within `with Queueing() as queue:` wait for a free process, so that
    a deadline on the calls can exclude that time. Overlapping waits count once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: set[object] = set()
        self._since = self._past = 0.0

    def __enter__(self) -> Queueing:
        self._before = _queueing.set(self)
        return self

    def __exit__(self, *_: object) -> None:
        _queueing.reset(self._before)

    @property
    def seconds(self) -> float:
        with self._lock:
            return self._past + (time.monotonic() - self._since if self._waiting else 0.0)

    def begin(self, call: object) -> None:
        """Begin the call's wait."""
        with self._lock:
            self._since = self._since if self._waiting else time.monotonic()
            self._waiting.add(call)

    def end(self, call: object) -> None:
        """End the call's wait, if it hasn't ended yet."""
        with self._lock:
            if self._waiting == {call}:
                self._past += time.monotonic() - self._since
            self._waiting.discard(call)


_queueing: ContextVar[Queueing | None] = ContextVar("queueing", default=None)
# Creates a context in which a call waits for a free process, or an agent's command waits to begin.
# The environment host sets one that pauses the trajectory's own time (rose/agent/own_time.py).
QUEUED: ContextVar[Callable[[], AbstractContextManager[None]]] = ContextVar(
    "queued", default=nullcontext
)


class FunctionFailed(RuntimeError):
    """The function raised, or its process ended. The message has the function's error."""


def load(key: str, spec: str) -> Callable:
    """Return the function `file.py:name` or `package.module:name`. A file is run only at its first
    use. Raises `ConfigError` that names `key`."""
    return _load(key, spec, os.getcwd())


@functools.cache
def _load(key: str, spec: str, current_folder: str) -> Callable:
    return function.load(spec, key)


class FunctionTooSlow(FunctionFailed):
    """The function exceeded its time limit, and its process was killed."""


async def call(spec: str, limit_s: float | None = None, **arguments: Any) -> Any:
    """Call the function `spec` in a worker process and return its result. `limit_s` bounds its
    computing time, without the wait for a process and the function's import. Cancelling this kills
    the process if the call has begun. Raises `FunctionFailed` and `FunctionTooSlow`."""
    place, _, name = spec.rpartition(":")
    whole = f"{Path(place).resolve()}:{name}" if place.endswith(".py") else spec
    line = json.dumps([whole, arguments], default=msgspec.to_builtins).encode() + b"\n"
    loop, begun = asyncio.get_running_loop(), asyncio.Event()
    running = _FunctionCall(limit_s, lambda: loop.call_soon_threadsafe(begun.set))
    working = asyncio.wrap_future(_pool().submit(running.run, line))
    try:
        with QUEUED.get()():
            await begun.wait()
        answer = await working
    except asyncio.CancelledError:
        working.cancel()
        running.cancel()
        raise
    if answer.get("too_slow"):
        raise FunctionTooSlow(f"{spec}: did not return within {limit_s:g} s")
    if "error" in answer:
        raise FunctionFailed(f"{spec}: {answer['error']}")
    return answer["value"]


@functools.cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(min(MOST, processes.usable_threads()), "worker-process")


class _FunctionCall:
    """A call that a thread runs and the event loop may cancel. Its thread first calls on_begin."""

    def __init__(self, limit_s: float | None, on_begin: Callable[[], object]) -> None:
        self._limit_s, self._on_begin = limit_s, on_begin
        self._queue = _queueing.get() or Queueing()
        self._queue.begin(self)
        self._lock = threading.Lock()
        self._process: subprocess.Popen | None = None
        self._cancelled = False

    def run(self, line: bytes) -> dict[str, Any]:
        """Pass the call, a line of JSON, to this thread's worker process. Return its answer."""
        self._queue.end(self)
        with suppress(RuntimeError):  # error of a closed event loop, in which no caller waits
            self._on_begin()
        with self._lock:
            if self._cancelled:
                return {"error": "cancelled before it began"}
            self._process = process = _worker()
        slow = threading.Event()
        limit = threading.Timer(self._limit_s or 0, lambda: (slow.set(), process.kill()))
        try:
            process.stdin.write(line)
            process.stdin.flush()
            answer = process.stdout.readline()  # `BEGUN`, once the function is imported
            if self._limit_s is not None and answer == BEGUN:
                limit.start()
            answer = process.stdout.readline() if answer == BEGUN else answer
        except OSError:
            answer = b""
        with self._lock:
            self._process = None
        limit.cancel()
        if limit.ident is not None:
            limit.join()
        whole = answer.endswith(b"\n")
        if not whole or slow.is_set() or self._cancelled:
            # The process has ended or was killed, perhaps after it had answered.
            process.kill()
            process.wait()
            _own.worker = None
        if whole:
            return json.loads(answer)
        return {
            "too_slow": slow.is_set(),
            "error": f"its process ended with code {process.returncode} before it answered",
        }

    def cancel(self) -> None:
        self._queue.end(self)
        with self._lock:
            self._cancelled = True
            if self._process is not None:
                self._process.kill()


def _worker() -> subprocess.Popen:
    """Return this thread's worker process. Start one if none is running."""
    process = getattr(_own, "worker", None)
    if process is None or process.poll() is not None:
        path = os.pathsep.join(filter(None, sys.path))
        process = _own.worker = subprocess.Popen(
            [sys.executable, "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # Sets get the same order on every host, so that a seed gives the same question there.
            env=os.environ | {"PYTHONPATH": path, "PYTHONHASHSEED": "0"},
        )
    return process


def serve() -> None:
    """Answer calls until the input ends, as a worker process. Output goes to the host's log."""
    processes.die_with_parent()
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    for line in sys.stdin.buffer:
        spec, arguments = json.loads(line)
        try:
            called = load("function", spec)
            if "episode" in arguments:
                arguments["episode"] = msgspec.convert(arguments["episode"], Episode)
            answers.write(BEGUN)
            value = function.result(called(**arguments))
            text = json.dumps({"value": value}, default=values.to_json)
        except BaseException as error:
            text = json.dumps({"error": f"{type(error).__name__}: {error}"[:SAID]})
        answers.write(text.encode() + b"\n")


if __name__ == "__main__":
    serve()
