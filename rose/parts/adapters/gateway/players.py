"""Processes that play whole episodes of a foreign library (envs/verifiers.py).

Each configuration has one process, which plays many episodes at once. The first episode starts it.
If an environment blocks the process, so that a cancelled episode does not end, the process is
killed. Its other episodes then fail, and the next episode starts the process again.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import time
from collections.abc import Callable
from typing import Any

import psutil

from rose import processes
from rose.parts.adapters.envs.verifiers import LOAD_S, Verifiers
from rose.parts.adapters.gateway import program, watchdog

CANCEL_S = 10.0  # seconds that a cancelled episode gets to end its tool servers and remove files
LINE = 2**24  # most bytes of an answer


class Players:
    """The processes of this host that play episodes."""

    def __init__(self) -> None:
        self._processes: dict[tuple[str, ...], _Process] = {}
        self._starting = asyncio.Lock()
        # The last failed start of each configuration: its time (monotonic seconds) and its error.
        self._failed: dict[tuple[str, ...], tuple[float, OSError]] = {}

    async def start(
        self, verifiers: Verifiers, order: dict[str, Any], take: Callable[[dict[str, Any]], None]
    ) -> Playing:
        """Start an episode. `order`: as in `Player.play` (_verifiers_player.py), with the episode's
        `name`. `take` receives an answer with a reward. Raises OSError if the start fails."""
        key = (verifiers.settings, *verifiers.command, *verifiers.environment)
        asked = time.monotonic()
        async with self._starting:  # shared start of episodes that begin together
            process = self._processes.get(key)
            if process is None or process.ended:
                at, error = self._failed.get(key, (0.0, None))
                if error is not None and at >= asked:  # failed while this episode waited
                    raise OSError(str(error))
                process = self._processes[key] = await self._start_process(key, verifiers)
        return process.play(order, take)

    async def _start_process(self, key: tuple[str, ...], verifiers: Verifiers) -> _Process:
        try:
            return await _Process.start(verifiers)
        except OSError as error:
            self._failed[key] = time.monotonic(), error
            raise

    async def close(self) -> None:
        for process in self._processes.values():
            await process.close()


class Playing:
    """An episode, with the methods of a `Program`, so that `_Run` can watch it. `code` becomes 0
    when the reward arrives, and 1 when the episode fails."""

    def __init__(self, name: str, process: _Process, take: Callable[[dict[str, Any]], None]):
        self.name, self._process, self._take, self._error = name, process, take, ""
        self.code: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def finish(self, answer: dict[str, Any]) -> None:
        """Set `code` for the answer of the process, a reward or an error."""
        self._error = answer.get("error", "")
        if not self._error:
            try:
                self._take(answer)
            except ValueError as error:
                self._error = str(error)
        self.code.set_result(1 if self._error else 0)

    def cut_log(self) -> None:
        """Do nothing, because environments print to the environment host's own log."""

    def last_words(self) -> str:
        return self._error[-program.LOG_BYTES :]

    async def end(self) -> None:
        """Cancel the episode and wait for its end. After `CANCEL_S`, kill its process."""
        if not self.code.done():
            self._process.send({"cancel": self.name})
            await asyncio.wait({self.code}, timeout=CANCEL_S)
        if not self.code.done():
            await self._process.kill()


class _Process:
    """A process that plays the episodes of one configuration."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._playing: dict[str, Playing] = {}
        self._reading = asyncio.create_task(self._read_answers())

    @classmethod
    async def start(cls, verifiers: Verifiers) -> _Process:
        host = os.getpid()
        process = await asyncio.create_subprocess_exec(
            *verifiers.command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=processes.bare_environment(verifiers.environment)
            | {watchdog.MARK: program.HOST, "PYTHONHASHSEED": "0"},
            limit=LINE,
            start_new_session=True,
            preexec_fn=lambda: processes.die_with_parent(host),
        )
        try:
            process.stdin.write(f"{verifiers.settings}\n".encode())
            line = await asyncio.wait_for(process.stdout.readline(), LOAD_S)
            loaded = json.loads(line or '{"error": "its process ended while it loaded"}')
        except ValueError as error:  # a line that is too long, or cut by the process's end
            loaded = {"error": f"its answer can't be read: {error}"}
        except TimeoutError:
            loaded = {"error": f"it was not loaded within {LOAD_S:g} s"}
        except BaseException:
            with contextlib.suppress(ProcessLookupError):  # It may have ended just now.
                process.kill()
            raise
        if "error" not in loaded and loaded != verifiers.tasks:
            loaded = {
                "error": f"it loaded other tasks than before ({loaded}, then {verifiers.tasks}): a "
                "seed must mean the same task each time; give the taskset a fixed seed or an order"
            }
        if "error" in loaded:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            raise OSError(loaded["error"])
        return cls(process)

    @property
    def ended(self) -> bool:
        return self._reading.done()

    def play(self, order: dict[str, Any], take: Callable[[dict[str, Any]], None]) -> Playing:
        playing = self._playing[order["name"]] = Playing(order["name"], self, take)
        self.send(order)
        return playing

    def send(self, order: dict[str, Any]) -> None:
        self._process.stdin.write(json.dumps(order).encode() + b"\n")

    async def _read_answers(self) -> None:
        cause = "the process that plays the episodes has ended"
        try:
            while line := await self._process.stdout.readline():
                answer = json.loads(line)
                if (playing := self._playing.pop(answer["name"], None)) is not None:
                    playing.finish(answer)
        except ValueError as error:  # a line that is too long, or cut by the process's end
            cause = f"an answer of the process that plays the episodes can't be read: {error}"
            self._kill_all()
        for playing in self._playing.values():
            playing.finish({"error": cause})

    async def kill(self) -> None:
        """Kill the process and wait for its end."""
        self._kill_all()
        await self._process.wait()
        await self._reading

    def _kill_all(self) -> None:
        """Kill the process and its descendants, as tool servers run in sessions of their own."""
        with contextlib.suppress(psutil.Error):
            for child in psutil.Process(self._process.pid).children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    child.kill()
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    async def close(self) -> None:
        """Close the process's input, so that it ends. After `CANCEL_S`, kill it."""
        self._process.stdin.close()
        await asyncio.wait({self._reading}, timeout=CANCEL_S)
        await self.kill()
