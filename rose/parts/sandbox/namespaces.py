"""The host's side of the backend `namespaces`: the keeper process (keeper.py) and its sandboxes."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import resource
import socket
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rose.parts.sandbox import criu
from rose.parts.sandbox.backend import GUARDED, Fresh, SandboxError, Spec
from rose.parts.sandbox.init import receive, send

NAME = "namespaces"
START_S = 30.0  # seconds for the keeper or a sandbox to start on a busy machine
CHECK_FLOOD_BYTES = 16 << 20  # most output of a check before it is stopped
ANSWER_BYTES = 64 << 20  # most bytes of a result
MOST_FILES = 65_536  # open files of this process: four per sandbox, above init.MOST_FILES
# Errors about a file, its path or its disk. All other errors are failures of the sandbox.
OF_FILES = {
    errno.EACCES, errno.EBUSY, errno.EDQUOT, errno.EEXIST, errno.EFBIG, errno.EINVAL, errno.EISDIR,
    errno.ELOOP, errno.ENAMETOOLONG, errno.ENODEV, errno.ENOENT, errno.ENOSPC, errno.ENOTDIR,
    errno.ENXIO, errno.EOVERFLOW, errno.EPERM, errno.EROFS, errno.ETXTBSY,
}  # fmt: skip
PATH_BYTES = 4096  # Linux's PATH_MAX
BEGIN_AT_ONCE = 8  # starts of sandboxes; the keeper's socket holds a hundred orders
ORDER_S = 30.0  # seconds for an answer of process 1, which takes milliseconds
IDLE_S = 1.0  # seconds for the answer to `idle`, which is optional
KILLED_S = 10.0  # seconds that killed processes have to end
KILLED_POLL_S = 0.05  # seconds between two attempts to begin a check
PACKAGE_ROOT = str(Path(__file__).resolve().parents[3])


class _Line:
    """The host's end of a sandbox's socket, to which the keeper and process 1 send messages.
    Answers arrive in the order in which the orders were sent."""

    def __init__(self, end: socket.socket, on_event: Callable[[dict[str, Any] | None], None]):
        end.setblocking(False)
        self.end, self._on_event = end, on_event
        self._waiting: deque[asyncio.Future] = deque()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(end, self._read)
        self.open = True

    def _read(self) -> None:
        """Take one message: an answer to the oldest open order, or an event."""
        try:
            message, fds = receive(self.end)
        except BlockingIOError:
            return
        except OSError:
            message, fds = None, []
        if message is None:
            self.close()
            self._on_event(None)
        elif "answer" in message and self._waiting:
            future = self._waiting.popleft()
            if future.done():
                _close(fds)
            else:
                future.set_result((message["answer"], fds))
        elif "answer" in message:
            _close(fds)
        else:
            self._on_event(message | ({"fds": fds} if fds else {}))

    def order(self, message: dict[str, Any]) -> asyncio.Future:
        """Send an order. The future's result is (answer, file descriptors)."""
        future = self._loop.create_future()
        if not self.open:
            future.set_exception(SandboxError("the sandbox's first process has ended"))
            return future
        send(self.end, message)  # if this fails, no answer is expected
        self._waiting.append(future)
        return future

    def close(self) -> None:
        if self.open:
            self.open = False
            self._loop.remove_reader(self.end)
            self.end.close()
            for future in self._waiting:
                if not future.done():
                    future.set_exception(SandboxError("the sandbox's first process has ended"))
            self._waiting.clear()


def _close(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)


class Keeper:
    """A keeper process, one for each host process. `close` ends it with all of its sandboxes."""

    def __init__(self, process: subprocess.Popen, end: socket.socket, found: dict[str, Any]):
        self.process, self.end = process, end
        self._beginning = asyncio.Semaphore(BEGIN_AT_ONCE)
        self.root: bool = found["root"]
        self.lacking: dict[str, str] = found["lacking"]  # limits that can't be set, and why

    @classmethod
    def start(cls) -> Keeper:
        """Start a keeper. Raises `SandboxError` if this machine doesn't permit that."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # -S: a keeper needs no site packages, and starts twice as fast without them.
        argv = [sys.executable, "-S", "-m", "rose.parts.sandbox.keeper", str(theirs.fileno())]
        errors = tempfile.TemporaryFile()  # noqa: SIM115 (closed below)
        process = subprocess.Popen(
            argv,
            env={"PYTHONPATH": PACKAGE_ROOT, "PATH": os.environ.get("PATH", "")},
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            start_new_session=True,
            cwd="/",
        )
        theirs.close()
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, MOST_FILES)), hard))
        ours.settimeout(START_S)
        try:
            found, _ = receive(ours)
        except TimeoutError:
            found = {"failed": f"its keeper did not answer within {START_S:g} s"}
        if found is None or "failed" in found:
            process.kill()
            process.wait()
            errors.seek(0)
            last = errors.read().decode(errors="replace").strip().splitlines()
            ours.close()
            errors.close()
            raise SandboxError(found["failed"] if found else last[-1] if last else "no keeper")
        errors.close()
        ours.setblocking(False)
        return cls(process, ours, found)

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    async def begin(self, spec: Spec, saved: tuple[int, int] | None = None) -> Namespaces:
        """Start a sandbox. `saved`: file descriptors of a listing and its folder of contents
        (layer.py); then the sandbox has these files and no session. Raises `SandboxError`."""
        order = asdict(spec) | {"variables": spec.variables()}
        async with self._beginning:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            made = Namespaces(self, ours)
            try:
                send(self.end, order, (theirs.fileno(), *(saved or ())))
            except OSError as error:
                made.line.close()
                raise SandboxError(f"the keeper of sandboxes is gone: {error}") from None
            finally:
                theirs.close()
            # `START_S` includes earlier starts, because the keeper starts one sandbox at a time.
            try:
                await asyncio.wait_for(made.ready(), START_S)
                if saved is None:
                    await made.restart(None)
            except TimeoutError:
                await made.close()
                raise SandboxError(f"a sandbox was not ready within {START_S:g} s") from None
            except BaseException:
                await made.close()
                raise
        return made

    def close(self) -> None:
        self.end.close()
        try:
            self.process.wait(START_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class Namespaces:
    """A sandbox: orders to its process 1, and the pipes of its session (`backend.Shell`)."""

    keeps_files = True

    def __init__(self, keeper: Keeper, control: socket.socket) -> None:
        self.keeper = keeper
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._on_end: Callable[[str], None] = lambda words: None
        self.pid = 0  # id of process 1 on the host
        self.user = 0  # host user of the sandbox's root, 0 without root
        self.session = 0  # id of the session's bash in the sandbox
        self.commands = self.output = self.codes = -1
        self._why = ""  # text about the error that ended process 1
        self.line = _Line(control, self._event)

    def on_end(self, callback: Callable[[str], None]) -> None:
        self._on_end = callback

    async def ready(self) -> None:
        await asyncio.shield(self._ready)

    def _event(self, message: dict[str, Any] | None) -> None:
        """Handle a message that is not an answer, or None for the socket's end."""
        if message is None:
            self._fail_start(f"the sandbox ended while it was made{self._why}")
            self._on_end(f"the sandbox's first process has ended{self._why}")
        elif "broken" in message:
            self._why = f" ({message['broken']})"
        elif "failed" in message:
            self._fail_start(message["failed"])
        elif "ready" in message:
            self.commands, self.output, self.codes = message["fds"]
            if self.pid and not self._ready.done():
                self._ready.set_result(None)
        elif "pid" in message:
            self.pid, self.user = message["pid"], message["user"]
            if self.commands >= 0 and not self._ready.done():
                self._ready.set_result(None)
        elif "ended" in message:
            self._on_end("")

    def _fail_start(self, words: str) -> None:
        if not self._ready.done():
            self._ready.set_exception(SandboxError(f"backend {NAME}: {words}"))

    async def _order(self, **message: Any) -> tuple[dict[str, Any], list[int]]:
        try:
            answer, fds = await asyncio.wait_for(self.line.order(message), ORDER_S)
        except TimeoutError:
            raise SandboxError(
                f"the sandbox's first process did not {message['do']} within {ORDER_S:g} s"
            ) from None
        if "error" in answer:
            raise OSError(answer["error"], answer["words"])
        return answer, fds

    async def restart(self, cwd: str | None) -> None:
        try:
            await self._order(do="end")
            for fd in (self.commands, self.output, self.codes):  # no longer written by any process
                with contextlib.suppress(BlockingIOError):
                    while os.read(fd, 1 << 16):
                        pass
            answer, _ = await self._order(do="session", cwd=cwd)
            self.session = answer["pid"]
        except OSError as error:
            raise SandboxError(f"no new shell could be started: {error}") from None

    async def stop_since(self, ticks: int) -> bool:
        await self._order(do="stop", since=ticks)
        return True

    async def cwd(self) -> str | None:
        try:
            return (await self._order(do="cwd"))[0]["cwd"]
        except OSError:
            return None

    async def idle(self) -> bool:
        # An answer that is late, or an ended session, is no failure of the sandbox.
        with contextlib.suppress(TimeoutError, OSError, SandboxError):
            answer, _ = await asyncio.wait_for(self.line.order({"do": "idle"}), IDLE_S)
            return answer.get("idle", False)
        return False

    async def look(self) -> dict[str, Any]:
        return (await self._order(do="look"))[0]

    async def resume(self) -> None:
        await self._order(do="resume")

    async def _open(self, path: str, write: bool) -> int:
        """Open a file. If a resource is used up, kill the agent's processes and try again. Raises
        OSError for errors of the file, and `SandboxError` for any other error."""
        for last in (False, True):
            try:
                return (await self._order(do="open", path=_checked_path(path), write=write))[1][0]
            except OSError as error:
                if error.errno in OF_FILES:
                    raise
                if last:
                    raise SandboxError(f"{path[:200]!r} could not be opened: {error}") from None
            await self.stop_since(0)
        raise AssertionError

    async def read(self, path: str, limit: int) -> bytes:
        fd = await self._open(path, False)
        with os.fdopen(fd, "rb") as file:
            return file.read(limit)

    async def write(self, path: str, data: bytes) -> None:
        fd = await self._open(path, True)
        with os.fdopen(fd, "wb") as file:
            file.write(data)

    async def fresh(
        self, argv: list[str], files: bytes, at: str, collect: list[str], limit: int, wait_s: float
    ) -> Fresh:
        guarded = tuple(f"/{name}/" for name in GUARDED)
        if not all(path.startswith(guarded) for path in (f"{at}/", *collect)):
            raise SandboxError(f"a check's files lie below {GUARDED}, not {at!r} and {collect}")
        order = {"argv": argv, "at": at, "collect": collect, "limit": limit}
        answer, output = await self._check(order, files, wait_s)
        until = time.monotonic() + KILLED_S
        while answer.get("full") and time.monotonic() < until:
            # The agent has used up a resource. Kill its processes, and give the kernel some time.
            await self.stop_since(0)
            await asyncio.sleep(KILLED_POLL_S)
            answer, output = await self._check(order, files, wait_s)
        if "failed" in answer:
            raise SandboxError(f"backend {NAME}: {answer['failed']}")
        read = {path: text.encode("latin-1") for path, text in answer["files"].items()}
        return Fresh(answer["code"], output.decode(errors="replace"), read)

    async def _check(
        self, order: dict[str, Any], files: bytes, wait_s: float
    ) -> tuple[dict[str, Any], bytes]:
        """Run a check. Return its answer, with `code` None if it was stopped, and its output."""
        printed, theirs = os.pipe()
        with tempfile.TemporaryFile() as packed:
            packed.write(files)
            packed.flush()
            packed.seek(0)
            try:
                result = self._send_beside("check", order, packed.fileno(), theirs)
            except SandboxError:
                os.close(printed)
                raise
            finally:
                os.close(theirs)
        said, output = bytearray(), bytearray()
        done = asyncio.ensure_future(_until_end(result, said, ANSWER_BYTES, ANSWER_BYTES))
        shown = asyncio.ensure_future(
            _until_end(printed, output, order["limit"], CHECK_FLOOD_BYTES)
        )
        try:
            async with asyncio.timeout(wait_s):
                if await shown:  # False if it printed too much
                    await done
        except TimeoutError:
            pass
        finally:
            done.cancel()
            shown.cancel()
            await asyncio.wait({done, shown})  # closed pipes end the check
        if done.cancelled():
            return {"code": None, "files": {}}, bytes(output)
        return json.loads(said or b'{"failed": "the checker process was killed"}'), bytes(output)

    def _send_beside(self, do: str, order: dict[str, Any], *fds: int) -> int:
        """Have a child of the keeper carry out the order `do` in this sandbox. Return the pipe on
        which its answer arrives as JSON. Raises `SandboxError`."""
        result, end = os.pipe()
        try:
            send(self.keeper.end, order | {"do": do, "sandbox": self.pid}, (*fds, end))
        except OSError as error:
            os.close(result)
            raise SandboxError(f"the keeper of sandboxes is gone: {error}") from None
        finally:
            os.close(end)
        return result

    async def beside(self, do: str, order: dict[str, Any], *fds: int, wait_s: float) -> Any:
        """Carry out an order in this sandbox, and return the answer. Raises `SandboxError`."""
        result, output = self._send_beside(do, order, *fds), bytearray()
        try:
            async with asyncio.timeout(wait_s):
                await _until_end(result, output, ANSWER_BYTES, ANSWER_BYTES)
        except TimeoutError:
            raise SandboxError(f"backend {NAME}: no {do} within {wait_s:g} s") from None
        answer = json.loads(output or b'{"failed": "the process of the order was killed"}')
        if "failed" in answer:
            raise SandboxError(f"backend {NAME}: {answer['failed']}")
        return answer

    def captures(self) -> dict[str, str]:
        try:
            criu.find()
        except SandboxError as error:
            return {"files": "", "process": str(error)}
        return {"files": "", "process": ""}

    async def upper(self) -> int:
        """Open the overlay's upper layer (a file descriptor). Raises `SandboxError`, OSError."""
        return (await self._order(do="upper"))[1][0]

    async def adopt(self, session: int) -> None:
        """Make a restored process the session. Raises `SandboxError`."""
        try:
            await self._order(do="adopt", pid=session)
        except OSError as error:
            raise SandboxError(f"the captured shell ended at once: {error}") from None
        self.session = session

    async def number_after(self, last_pid: int) -> None:
        """Give new processes ids above `last_pid`."""
        await self._order(do="number", last=last_pid)

    async def close(self) -> None:
        """Close the socket, which ends process 1 and with it all processes of the sandbox."""
        self.line.close()
        _close([fd for fd in (self.commands, self.output, self.codes) if fd >= 0])
        self.commands = self.output = self.codes = -1


def _checked_path(path: str) -> str:
    if len(path.encode(errors="replace")) >= PATH_BYTES:
        raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG))
    return path


async def _until_end(fd: int, into: bytearray, keep: int, most: int) -> bool:
    """Read a pipe to its end and close it. Append the first `keep` bytes to `into`. After more than
    `most` bytes, stop and return False."""
    loop, done = asyncio.get_running_loop(), asyncio.get_running_loop().create_future()
    count = 0

    def read() -> None:
        nonlocal count
        data = os.read(fd, 1 << 16)
        count += len(data)
        into.extend(data[: max(0, keep - len(into))])
        if (not data or count > most) and not done.done():
            done.set_result(not data)

    loop.add_reader(fd, read)
    try:
        return await done
    finally:
        loop.remove_reader(fd)
        os.close(fd)
