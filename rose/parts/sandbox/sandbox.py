"""An isolated bash session: commands with deadlines and output limits, files, and a check.

    async with await Sandbox.start(Spec()) as box:
        result = await box.run("ls; cd /tmp", wait_s=10)

Whatever a command does to its sandbox, `run` returns a `Result` that describes it. `SandboxError`
means that the sandbox itself is gone. A sandbox belongs to one event loop and one task at a time.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from pathlib import Path

from rose.parts.sandbox import capture as capturing
from rose.parts.sandbox.backend import (
    ACCOUNT,
    COMMAND_BYTES,
    Fresh,
    Result,
    SandboxError,
    Shell,
    Spec,
)
from rose.parts.sandbox.check import pack
from rose.parts.sandbox.probe import announce, begin, keeper
from rose.parts.sandbox.replay import LOST, lost

OUTPUT_BYTES = 16 * 1024
FLOOD_BYTES = 64 << 20  # bytes of dropped output after which a command is stopped
READ_BYTES = 1 << 16
CODE_BYTES = 4  # most bytes of an exit code with its NUL
ACCOUNT_BYTES = 4 << 20  # most bytes of a shell's state that is captured or compared
# Seconds for a shell to print or restore its state. bash alone repeats failed forks for 15 s.
ACCOUNT_S = 30.0
GRACE_S = 1.0  # seconds for the shell to notice that its command was killed
STOP_EVERY_S = 0.1  # seconds between two attempts to kill a command
# Seconds between two checks whether the session waits for a command but sent no exit code.
IDLE_EVERY_S = 1.0
NO_CODE = "its shell went on without an exit code"
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
RESTARTED = "a new one was begun: variables and background processes are lost, files are "


class Sandbox:
    """A running sandbox."""

    def __init__(self, shell: Shell, spec: Spec, backend: str) -> None:
        self.shell, self.spec, self.backend = shell, spec, backend
        self._ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        shell.on_end(self._session_ended)
        self._closed = False
        self.lost = ""  # text about state that a restore lost

    @property
    def capture_kinds(self) -> tuple[str, ...]:
        """Kinds of `capture` that work here."""
        return tuple(kind for kind, problem in self.shell.captures().items() if not problem)

    @classmethod
    async def restore(cls, folder: Path, backend: str = "auto", kind: str | None = None) -> Sandbox:
        """Restore a sandbox from a capture, which remains usable. `kind`: "files" to leave out
        captured processes; then `lost` names them. Raises `SandboxError`."""
        saved = capturing.read(Path(folder), kind)
        if backend not in ("auto", saved.backend):
            raise SandboxError(f"backend={backend!r}: {folder} was captured with {saved.backend!r}")
        shell = await capturing.restore(saved, keeper)
        announce(saved.backend)
        box = cls(shell, saved.spec, saved.backend)
        if saved.kind == capturing.FILES:
            try:
                await shell.restart(None)
                failed = await box._replay(saved.script)
            except BaseException:
                await box.close()
                raise
            words = [f"of the shell were not brought back: {', '.join(failed)}"] if failed else []
            words += [LOST + ", ".join(saved.running)] if saved.running else []
            box.lost = "; ".join(words)
        if saved.lost:
            words = f"were not brought back: {', '.join(saved.lost)}"
            box.lost = "; ".join(filter(None, (box.lost, words)))
        return box

    async def capture(
        self, kind: str, folder: Path, since: capturing.Listing | None = None
    ) -> capturing.Capture:
        """Capture the present state in the new folder `folder`: "files", or "process" with the
        processes, too. `since`: the listing of an earlier capture of this sandbox; contents of
        files that are unchanged since then are left out. Don't call this while a command runs. If
        it fails, remove the folder and raise `SandboxError`; the sandbox remains usable."""
        if self._closed:
            raise SandboxError("the sandbox is closed")
        kinds = self.shell.captures()
        if kinds.get(kind, "no such kind") != "":
            words = kinds.get(kind) or f"there are {', '.join(kinds) or 'none'}"
            raise SandboxError(f"backend {self.backend} captures no {kind!r} here: {words}")
        said = await self.account()
        if said is None:
            raise SandboxError("its shell did not print its state")
        try:
            spec, backend = self.spec, self.backend
            return await capturing.take(self.shell, spec, backend, kind, folder, since, said)
        finally:
            await self.shell.resume()

    async def _replay(self, script: str) -> list[str]:
        """Restore the shell's state. Return the parts that failed. Raises `SandboxError`."""
        running = _RunningCommand(self.shell, OUTPUT_BYTES)
        running.begin(script.encode(errors="surrogateescape") + b"\0")
        try:
            waiting = {running.done, self._ended}
            await asyncio.wait(waiting, timeout=ACCOUNT_S, return_when=asyncio.FIRST_COMPLETED)
        finally:
            running.stop_reading()
        if running.code is None:
            raise SandboxError(f"its shell did not take the captured state in {ACCOUNT_S:g} s")
        return lost(bytes(running.output))

    @classmethod
    async def start(cls, spec: Spec, backend: str = "auto") -> Sandbox:
        """Start a sandbox. Raises `SandboxError` with the reason why each backend failed."""
        shell, name = await begin(spec, backend)
        announce(name)
        return cls(shell, spec, name)

    async def __aenter__(self) -> Sandbox:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """End all processes and remove the sandbox's files. Safe to call twice."""
        if not self._closed:
            self._closed = True
            await self.shell.close()

    async def run(self, command: str, wait_s: float, limit: int = OUTPUT_BYTES) -> Result:
        """Run `command` in the session, for `wait_s` seconds at most. `limit`: most bytes of output
        that are returned. Raises `SandboxError`."""
        if self._closed:
            raise SandboxError("the sandbox is closed")
        data = command.encode(errors="replace")
        if b"\0" in data or len(data) > COMMAND_BYTES or command in (ACCOUNT, "\2"):
            words = f"not run: a command has at most {COMMAND_BYTES} bytes of text"
            return Result("", None, words)
        running = _RunningCommand(self.shell, limit)
        began = time.monotonic()
        ticks = int(time.clock_gettime(time.CLOCK_BOOTTIME) * TICKS_PER_S)
        running.begin(data + b"\0")
        try:
            await self._wait(running, wait_s)
            note, restarted = await self._settle(running, ticks, wait_s)
        finally:
            running.stop_reading()
        if running.dropped:
            cut = f"output cut: the first {limit} of {limit + running.dropped} bytes are shown"
            note = "; ".join(filter(None, (note, cut)))
        code = running.code if not note or running.stopped is None else None
        if code == 137 and not note:
            note = f"exit code 137: killed; the sandbox has {self.spec.limits.memory_mib} MiB"
        elif code and running.dropped:
            note += f"; exit code {code}"
        seconds = time.monotonic() - began
        output = bytes(running.output).decode(errors="replace")
        return Result(output, code, note, seconds, restarted)

    async def account(self, wait_s: float = ACCOUNT_S) -> bytes | None:
        """Return the shell's state, as printed for `ACCOUNT`. None if it is too long, or if the
        shell ended or had to be stopped; the session may then be new. Raises `SandboxError`."""
        if self._closed:
            raise SandboxError("the sandbox is closed")
        running = _Account(self.shell, ACCOUNT_BYTES)
        ticks = int(time.clock_gettime(time.CLOCK_BOOTTIME) * TICKS_PER_S)
        running.begin(ACCOUNT.encode() + b"\0")
        try:
            await self._wait(running, wait_s)
            note, _ = await self._settle(running, ticks, wait_s)
        finally:
            running.stop_reading()
        return None if note or running.dropped else bytes(running.output)

    async def _wait(self, running: _RunningCommand, wait_s: float) -> None:
        """Wait until the command is done or must be stopped, the shell has ended or waits for its
        next command, or `wait_s` seconds have passed."""
        until, waiting = time.monotonic() + wait_s, {running.done, self._ended}
        while (left_s := until - time.monotonic()) > 0:
            pause_s = min(left_s, IDLE_EVERY_S)
            if (await asyncio.wait(waiting, timeout=pause_s, return_when="FIRST_COMPLETED"))[0]:
                return
            if running.written and await self.shell.idle() and not running.done.done():
                running.stopped = NO_CODE
                return

    async def _settle(
        self, running: _RunningCommand, ticks: int, wait_s: float
    ) -> tuple[str, bool]:
        """Stop the command or restart the session, unless the session can take a new command.
        Return a text about that, and whether the session is new. `ticks`: the command's start."""
        if running.done.done() and running.stopped is None:
            return "", False
        if self._ended.done():
            if self._ended.result():
                raise SandboxError(self._ended.result())
            await self._restart(None)
            return f"the shell ended; {self._restart_text}", True
        words = running.stopped or f"stopped: not done after {wait_s:g} s"
        running.stopped = words
        until = time.monotonic() + (0.0 if words == NO_CODE else GRACE_S)
        while running.code is None and time.monotonic() < until and not self._ended.done():
            if not await self.shell.stop_since(ticks):
                break
            waiting = {running.coded, self._ended}
            await asyncio.wait(waiting, timeout=STOP_EVERY_S, return_when=asyncio.FIRST_COMPLETED)
        if running.code is not None:
            return words, False
        await self._restart(await self.shell.cwd())
        return f"{words}; its shell had to be ended, {self._restart_text}", True

    @property
    def _restart_text(self) -> str:
        return RESTARTED + ("kept" if self.shell.keeps_files else "lost, too")

    async def _restart(self, cwd: str | None) -> None:
        old, self._ended = self._ended, asyncio.get_running_loop().create_future()
        await self.shell.restart(cwd)
        if not old.done():
            # The end of the old session arrived during `restart` and resolved the new future.
            self._ended = asyncio.get_running_loop().create_future()

    def _session_ended(self, words: str) -> None:
        if not self._ended.done():
            self._ended.set_result(words)

    async def read_file(self, path: str, limit: int = 1 << 20) -> bytes:
        """Return the first `limit` bytes. Raises the OSError that an agent's program would get."""
        return await self.shell.read(path, limit)

    async def write_file(self, path: str, data: bytes) -> None:
        """Write a whole file, and create missing folders. Raises OSError."""
        await self.shell.write(path, data)

    async def check(
        self,
        argv: list[str],
        folder: str,
        at: str = "/tests",
        collect: tuple[str, ...] = (),
        wait_s: float = 60.0,
        limit: int = OUTPUT_BYTES,
    ) -> Fresh:
        """Run `argv`, which begins with a program's path, on the sandbox's present state, with a
        copy of the host's `folder` at `at`. The agent's processes can't touch this program or its
        files. `collect`: files to return, below folders of the check. Raises `SandboxError`."""
        tar = await asyncio.to_thread(pack, folder)
        return await self.shell.fresh(argv, tar, at, list(collect), limit, wait_s)


class _RunningCommand:
    """A running command, whose output and exit code are read in the background."""

    def __init__(self, shell: Shell, limit: int) -> None:
        self.shell, self.limit = shell, limit
        self.loop = asyncio.get_running_loop()
        # `done` resolves when the command has ended or must be stopped, `coded` at its exit code.
        self.done: asyncio.Future[None] = self.loop.create_future()
        self.coded: asyncio.Future[None] = self.loop.create_future()
        self.output, self.dropped = bytearray(), 0
        self.code: int | None = None
        self.stopped: str | None = None  # why the command must be stopped, None if it needn't
        self._codes = b""

    def begin(self, data: bytes) -> None:
        """Send the command `data` to the session, and start reading."""
        self._left = data
        self._fds = (self.shell.commands, self.shell.output, self.shell.codes)
        self.loop.add_reader(self._fds[1], self._read)
        self.loop.add_reader(self._fds[2], self._read_code)
        self._write()

    @property
    def written(self) -> bool:
        """True when the whole command is in the session's pipe."""
        return not self._left

    def _write(self) -> None:
        with contextlib.suppress(BlockingIOError, BrokenPipeError):
            self._left = self._left[os.write(self._fds[0], self._left) :]
        if self._left:
            self.loop.add_writer(self._fds[0], self._write)
        else:
            self.loop.remove_writer(self._fds[0])

    def _read(self) -> bool:
        """Read output once. Return whether there may be more."""
        try:
            data = os.read(self._fds[1], READ_BYTES)
        except BlockingIOError:
            return False
        if not data:  # a pipe whose other end is closed
            self.loop.remove_reader(self._fds[1])
            return False
        kept = data[: max(0, self.limit - len(self.output))]
        self.output += kept
        self.dropped += len(data) - len(kept)
        if self.dropped > FLOOD_BYTES and not self.done.done():
            self.stopped = f"stopped: it printed more than {FLOOD_BYTES >> 20} MiB"
            self.done.set_result(None)
        return True

    def _read_code(self) -> None:
        with contextlib.suppress(BlockingIOError):
            data = os.read(self._fds[2], READ_BYTES)
            self._codes = self._codes[-CODE_BYTES:] + data  # bounded, as the agent may write there
            if not data:
                self.loop.remove_reader(self._fds[2])
        code, end, _ = self._codes.partition(b"\0")
        if not end or self.code is not None:
            return
        # An agent's program may also write to this pipe, so the code can be any bytes.
        self.code = int(code) if code.isdigit() and len(code) < 4 else 255
        budget = FLOOD_BYTES
        while budget > 0 and self._read():  # output from before the exit code
            budget -= READ_BYTES
        self.coded.set_result(None)
        if not self.done.done():
            self.done.set_result(None)

    def stop_reading(self) -> None:
        for fd in self._fds[1:]:
            self.loop.remove_reader(fd)
        self.loop.remove_writer(self._fds[0])


class _Account(_RunningCommand):
    """A request for the session's state. The session writes the state into the pipe of exit codes,
    because background programs may write into the pipe of output. A NUL ends the state."""

    def begin(self, data: bytes) -> None:
        self._left = data
        self._fds = (self.shell.commands, self.shell.output, self.shell.codes)
        self.loop.add_reader(self._fds[2], self._read_code)
        self._write()

    def _read_code(self) -> None:
        try:
            data = os.read(self._fds[2], READ_BYTES)
        except BlockingIOError:
            return
        if not data:
            self.loop.remove_reader(self._fds[2])
        *ended, left = data.split(b"\0")
        for text in ended:
            self._append(text)
            # A DEBUG trap may have printed something before the answer.
            del self.output[: max(0, self.output.find(b"\1jobs\n"))]
            if (self.output.startswith(b"\1") or not text) and self.code is None:
                self.code = 0
                self.coded.set_result(None)
                if not self.done.done():
                    self.done.set_result(None)
            elif self.code is None:  # an exit code that a program of the agent wrote
                self.output.clear()
        self._append(left)

    def _append(self, text: bytes) -> None:
        if self.code is None:
            kept = text[: max(0, self.limit - len(self.output))]
            self.output += kept
            self.dropped += len(text) - len(kept)
