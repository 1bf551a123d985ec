"""The process that hashes, compresses and stores an environment host's checkpoints, so that this
work doesn't block the host's event loop.

    python -m rose.parts.sandbox.packer LOCAL SHARED BYTES_PER_S THREADS       `engine` starts it

Orders are JSON lines on standard input. When an order is done, its answer goes to standard output,
with its number. The process ends with its host. BYTES_PER_S bounds writes to SHARED (0: no bound).
"""

from __future__ import annotations

import asyncio
import errno
import itertools
import json
import os
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rose.parts.sandbox.packs import StoreDamaged
from rose.parts.sandbox.store import Store

START_S = 60.0  # seconds for a packer to start
PACKAGE_ROOT = str(Path(__file__).resolve().parents[3])
NICE = 10  # niceness, because engines and agents share the machine


class Pace:
    """Bounds the bytes per second that all threads write together."""

    def __init__(self, bytes_per_s: float) -> None:
        self.bytes_per_s = bytes_per_s
        self._lock = threading.Lock()
        self._free = time.monotonic()

    def __call__(self, count: int) -> None:
        """Wait until `count` more bytes may be written."""
        if not self.bytes_per_s:
            return
        with self._lock:
            begin = max(self._free, time.monotonic())
            self._free = begin + count / self.bytes_per_s
        time.sleep(max(0.0, begin - time.monotonic()))


class Packer:
    """Carries out orders on the stores in the folders `local` and `shared`."""

    def __init__(self, local: Path, shared: Path, bytes_per_s: float) -> None:
        self.shared = Store(shared, sync=True)
        self.local = Store(local, behind=self.shared)
        self.pace = Pace(bytes_per_s)

    def do(self, order: dict[str, Any]) -> dict[str, Any]:
        """Carry out an order and return its answer. Raises OSError and `StoreDamaged`."""
        name = order["name"]
        match order["do"]:
            case "save":
                parent = tuple(order["parent"]) if order["parent"] else None
                folder, keep = Path(order["folder"]), order["keep_image"]
                life = order["life"]
                made = self.local.save(name, order["turn"], folder, parent, keep, life)
                return {"raw": made.raw, "written": made.written}
            case "copy":
                written = self.local.copy(name, order["turn"], self.shared, self.pace)
                if written is None:
                    return {"error": "a later episode of this name is stored"}
                return {"written": written}
            case "forget":
                for store in (self.local, self.shared):
                    store.forget(name, order["keep"], order["upto"])
                return {}
            case "collect":
                return {"freed": self.local.collect() + self.shared.collect()}
            case other:
                raise ValueError(f"a packer has no use for {other}")


class PackerProcess:
    """The host's side of a packer."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._asked: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._numbers = itertools.count()
        self.ended = ""  # text with the exit code, "" while it runs
        self.killed = False  # True after its host killed it
        self._reading: asyncio.Task | None = None

    @classmethod
    async def start(
        cls, local: Path, shared: Path, bytes_per_s: float, threads: int
    ) -> PackerProcess:
        """Start a packer. Raises OSError with the packer's error."""
        argv = ["-m", "rose.parts.sandbox.packer", str(local), str(shared)]
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *argv,
            str(bytes_per_s),
            str(threads),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": PACKAGE_ROOT},
            start_new_session=True,  # the terminal's interrupt goes to the host only
        )
        made = cls(process)
        try:
            first = await asyncio.wait_for(process.stdout.readline(), START_S)
        except TimeoutError:
            first = b""
        found = json.loads(first or '{"error": "it did not start"}')
        if "error" in found:
            made.kill()
            await process.wait()
            raise OSError(errno.ECHILD, f"their packer: {found['error']}")
        made._reading = asyncio.ensure_future(made._read_answers())
        return made

    async def _read_answers(self) -> None:
        while line := await self._process.stdout.readline():
            answer = json.loads(line)
            future = self._asked.pop(answer["number"], None)
            if future is not None and not future.done():
                future.set_result(answer)
        self.ended = f"exit code {await self._process.wait()}"
        for future in self._asked.values():
            if not future.done():
                future.set_exception(ConnectionResetError(self.ended))
        self._asked.clear()

    async def ask(self, order: dict[str, Any]) -> dict[str, Any]:
        """Return the answer to `order`. Raises `ConnectionError` if the packer ends first."""
        if self.ended:
            raise ConnectionResetError(self.ended)
        number, future = next(self._numbers), asyncio.get_running_loop().create_future()
        self._asked[number] = future
        self._process.stdin.write(json.dumps({"number": number, **order}).encode() + b"\n")
        await self._process.stdin.drain()
        return await future

    def kill(self) -> None:
        self.killed = True
        if self._process.returncode is None:
            self._process.kill()

    async def close(self) -> None:
        self.kill()
        if self._reading is not None:
            await self._reading


def main() -> None:
    local, shared, bytes_per_s, threads = sys.argv[1:]
    os.nice(NICE)
    lock = threading.Lock()

    def answer(order: dict[str, Any]) -> None:
        try:
            found = packer.do(order)
        except (OSError, StoreDamaged) as error:
            found = {"error": str(error)}
        except Exception as error:
            found = {"error": repr(error)}
        line = json.dumps({"number": order["number"], **found})
        with lock:
            print(line, flush=True)

    try:
        packer = Packer(Path(local), Path(shared), float(bytes_per_s))
    except OSError as error:
        print(json.dumps({"error": str(error)}), flush=True)
        return
    print("{}", flush=True)
    pool = ThreadPoolExecutor(int(threads))
    for line in sys.stdin:
        pool.submit(answer, json.loads(line))
    os._exit(0)  # the host has ended; `Store.collect` removes half-written parts


if __name__ == "__main__":
    main()
