"""Processes for Python functions, forked from a server that has imported their modules (call.py).

Importing a client's package takes half a second. Without the server, hundreds of trajectories a
minute would keep two cores busy with imports alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from rose import processes
from rose.parts.adapters.gateway.program import Program, environment

START_S = 120.0  # seconds to import a function's packages; torch from a cold disk takes minutes


class Forks:
    """The servers of this host that fork processes for functions."""

    def __init__(self) -> None:
        self._servers: dict[tuple[str, tuple[str, ...]], _Server] = {}
        self._starting = asyncio.Lock()

    async def start(
        self,
        name: str,
        function: str,
        arguments: Sequence[str],
        given: Sequence[str],
        variables: Mapping[str, str],
        log: Path,
    ) -> Program:
        """Start a process that calls `function` (call.py). `name`, `variables`, `log`: as in
        `Program.start`. `given`: as in `environment`. Raises OSError if it can't be started."""
        key = (function, tuple(given))
        async with self._starting:  # shared start of trajectories that begin together
            server = self._servers.get(key)
            if server is None or server.ended:
                server = self._servers[key] = await _Server.start(function, given)
        return await server.fork(name, arguments, variables, log)

    async def close(self) -> None:
        for server in self._servers.values():
            await server.close()


class _Server:
    """The server that forks processes for one function, seen from the host."""

    def __init__(self, function: str, process: asyncio.subprocess.Process) -> None:
        self._function, self._process = function, process
        self._pids: dict[str, asyncio.Future[int]] = {}  # trajectory's name -> pid
        self._codes: dict[str, asyncio.Future[int]] = {}
        self._reading = asyncio.create_task(self._read_answers())

    @classmethod
    async def start(cls, function: str, given: Sequence[str]) -> _Server:
        host = os.getpid()
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "rose.parts.adapters.gateway.call",
            function,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=environment({}, given),
            start_new_session=True,
            preexec_fn=lambda: processes.die_with_parent(host),
        )
        return cls(function, process)

    @property
    def ended(self) -> bool:
        return self._reading.done()

    async def fork(
        self, name: str, arguments: Sequence[str], variables: Mapping[str, str], log: Path
    ) -> Program:
        """Start the function in a process forked from the server. Raises OSError if that fails."""
        loop = asyncio.get_running_loop()
        pid = self._pids[name] = loop.create_future()
        code = self._codes[name] = loop.create_future()
        order = {
            "name": name,
            "arguments": list(arguments),
            "variables": dict(variables),
            "log": str(log),
        }
        self._process.stdin.write(json.dumps(order).encode() + b"\n")
        try:
            await asyncio.wait({pid}, timeout=START_S)
        finally:
            if not pid.done():  # a cancelled or late start, whose process must end
                pid.add_done_callback(_kill_when_forked)
        if not pid.done():
            raise OSError(f"the imports of {self._function} took more than {START_S:g} s")
        return Program(name, pid.result(), code, log)

    async def _read_answers(self) -> None:
        while line := await self._process.stdout.readline():
            answer = json.loads(line)
            if "error" in answer:
                del self._codes[answer["name"]]
                _fail(self._pids.pop(answer["name"]), answer["error"])
                continue
            waiting = self._pids if "pid" in answer else self._codes
            future = waiting.pop(answer["name"], None)
            if future is not None and not future.done():
                future.set_result(answer.get("pid", answer.get("code")))
        for future in (*self._pids.values(), *self._codes.values()):
            _fail(future, f"the process that forks {self._function} has ended")

    async def close(self) -> None:
        self._process.stdin.close()
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()
        await self._reading


def _fail(future: asyncio.Future[int], cause: str) -> None:
    if not future.done():
        future.set_exception(OSError(cause))
        future.exception()  # read, so that asyncio doesn't log it


def _kill_when_forked(pid: asyncio.Future[int]) -> None:
    if not pid.cancelled() and pid.exception() is None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid.result(), signal.SIGTERM)
