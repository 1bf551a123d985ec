"""Sandboxes that another program runs (gvisor.py): a session on three pipes, and one more process
for each file access and each check.

They are weaker than `namespaces` in two ways. If a command misses its deadline, the session has to
be restarted. A check is visible to the agent's processes, so these are killed before it runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from rose import processes
from rose.parts.sandbox import check
from rose.parts.sandbox.backend import Fresh, SandboxError, Spec

START_S = 60.0  # seconds for a session to start, or for a capture
FILE_S = 30.0  # seconds to read or write a file
END_S = 10.0  # seconds for a command of `Program.end_commands`
BEGUN = "rose: the check begins"  # mark on standard error before a check's program
FIRST_BYTES = 64 << 10  # most bytes that a program prints before its shell's first answer


class Program(Protocol):
    """The commands that run one sandbox. `folder` is for the program's own files."""

    NAME: str
    PROGRAM: str
    keeps_files: bool  # True if files survive a restart of the session
    captures: dict[str, str]  # value of `backend.Shell.captures`

    @staticmethod
    def prepare(spec: Spec, folder: Path) -> None:
        """Write the program's files before the first command."""

    @staticmethod
    def setup_commands(spec: Spec, folder: Path) -> list[list[str]]:
        """Return commands that run one after the other before the session starts."""

    @staticmethod
    def session_command(spec: Spec, folder: Path) -> list[str]: ...

    @staticmethod
    def exec_command(spec: Spec, folder: Path, argv: list[str]) -> list[str]: ...

    @staticmethod
    def end_commands(folder: Path) -> list[list[str]]: ...

    @staticmethod
    def capture_command(folder: Path, images: Path) -> list[str]:
        """Return the command that captures the sandbox in the folder `images`. A program that can't
        capture has neither this nor `restore_command`."""

    @staticmethod
    def restore_command(folder: Path, images: Path) -> list[str]: ...


class Piped:
    """A running sandbox of a `Program` (`backend.Shell`)."""

    def __init__(self, program: type[Program], spec: Spec) -> None:
        self.program, self.spec, self.keeps_files = program, spec, program.keeps_files
        self.folder = Path(tempfile.mkdtemp(prefix="rose-sandbox-"))
        self._process: asyncio.subprocess.Process | None = None
        self._on_end: Callable[[str], None] = lambda words: None
        self.commands = self.output = self.codes = -1

    def on_end(self, callback: Callable[[str], None]) -> None:
        self._on_end = callback

    async def begin(self, images: Path | None = None) -> Piped:
        """Start the session, from the `images` of a capture if given. Raises `SandboxError`."""
        if shutil.which(self.program.PROGRAM) is None:
            await self.close()
            raise SandboxError(f"{self.program.PROGRAM} is not installed")
        try:
            await asyncio.to_thread(self.program.prepare, self.spec, self.folder)
            await self._begin_session(images)
        except BaseException:
            await self.close()
            raise
        return self

    async def _begin_session(self, images: Path | None = None) -> None:
        """Start the session, or restore it from `images`, and connect its three pipes."""
        for argv in self.program.setup_commands(self.spec, self.folder):
            await self._expect(argv, f"{self.program.PROGRAM}: not begun within {START_S:g} s")
        ours = [os.pipe() for _ in range(3)]
        ends = (ours[0][0], ours[1][1], ours[2][1])
        host = os.getpid()
        if images is None:
            argv = self.program.session_command(self.spec, self.folder)
        else:
            argv = self.program.restore_command(self.folder, images)
        self._process = await asyncio.create_subprocess_exec(
            *argv,
            stdin=ends[0],
            stdout=ends[1],
            stderr=ends[2],
            start_new_session=True,
            preexec_fn=lambda: processes.die_with_parent(host),
        )
        for fd in ends:
            os.close(fd)
        self.commands, self.output, self.codes = ours[0][1], ours[1][0], ours[2][0]
        for fd in (self.commands, self.output, self.codes):
            os.set_blocking(fd, False)
        with contextlib.suppress(BrokenPipeError):  # a failed start, whose error is read below
            os.write(self.commands, b":\0")
        words = bytearray()
        try:
            async with asyncio.timeout(START_S):
                await _until_nul(self.codes, words)
        except TimeoutError:
            words += f"its shell was not there within {START_S:g} s".encode()
        if words != b"0\0":
            raise SandboxError(f"{self.program.PROGRAM}: {words.decode(errors='replace')[-500:]}")
        process = self._process
        asyncio.ensure_future(process.wait()).add_done_callback(
            lambda _: self._on_end("") if self._process is process else None
        )

    async def _run(self, argv: list[str], data: bytes, wait_s: float) -> tuple[int, bytes, str]:
        """Run a command. Return its exit code, output and errors. Raises `TimeoutError`."""
        process = await asyncio.create_subprocess_exec(
            *argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        try:
            out, err = await asyncio.wait_for(process.communicate(data), wait_s)
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):  # It may have ended just now.
                process.kill()
            raise
        return process.returncode or 0, out, err.decode(errors="replace")

    async def _run_inside(self, script: str, data: bytes, wait_s: float) -> tuple[int, bytes, str]:
        bash = ["/bin/bash", "-c", script]
        argv = self.program.exec_command(self.spec, self.folder, bash)
        return await self._run(argv, data, wait_s)

    async def restart(self, cwd: str | None) -> None:
        await self._end_session()
        await self._begin_session()

    async def stop_since(self, ticks: int) -> bool:
        return False  # start times of a container's processes are not visible here

    async def idle(self) -> bool:
        return False  # the shell's state is not visible here

    async def cwd(self) -> str | None:
        return None

    async def look(self) -> dict[str, Any]:
        raise NotImplementedError(f"changes in {self.program.NAME} are not visible from here")

    async def resume(self) -> None:
        pass

    async def read(self, path: str, limit: int) -> bytes:
        script = f"test -f {shlex.quote(path)} && head -c {limit} -- {shlex.quote(path)}"
        data, words = await self._run_for_file(path, script, b"")
        if words:
            raise OSError(5, words)
        return data

    async def write(self, path: str, data: bytes) -> None:
        quoted = shlex.quote(path)
        script = f'mkdir -p "$(dirname -- {quoted})" && cat > {quoted}'
        _, words = await self._run_for_file(path, script, data)
        if words:
            raise OSError(5, words)

    async def _run_for_file(self, path: str, script: str, data: bytes) -> tuple[bytes, str]:
        """Run a script that reads or writes the file `path`. Return its output and its error, "" if
        it succeeded. Raises `SandboxError` if the script did not run to its end."""
        try:
            code, out, words = await self._run_inside(script, data, FILE_S)
        except TimeoutError:
            code, out, words = -1, b"", f"not done within {FILE_S:g} s"
        if code not in (0, 1):
            raise SandboxError(f"{self.program.PROGRAM}: {path[:200]!r}: {words.strip()[-500:]}")
        return out, words.strip() or f"not a regular file: {path!r}" if code else ""

    async def fresh(
        self, argv: list[str], files: bytes, at: str, collect: list[str], limit: int, wait_s: float
    ) -> Fresh:
        """Kill the agent's processes and run a check. Raises `SandboxError`."""
        folders = " ".join(shlex.quote(os.path.dirname(path)) for path in collect)
        script = (
            f"for p in /proc/[0-9]*; do p=${{p#/proc/}}; [ $p = 1 ] || [ $p = $$ ] || kill -9 $p; "
            f"done 2>/dev/null; {_settings_removal(self.spec.image)}; "
            f"rm -rf {shlex.quote(at)} {folders}; mkdir -p {shlex.quote(at)} "
            f"{folders} && tar x -C {shlex.quote(at)} && cd {shlex.quote(self.spec.workdir)} && "
            f"echo {BEGUN} >&2 && HOME=$(mktemp -d) PYTHONNOUSERSITE=1 exec {shlex.join(argv)} "
            "</dev/null 2>&1"
        )
        try:
            code, out, words = await self._run_inside(script, files, wait_s)
        except TimeoutError:
            return Fresh(None, "", {})
        if not words.endswith(f"{BEGUN}\n"):
            raise SandboxError(f"{self.program.PROGRAM}: no check: {words.strip()[-500:]}")
        read = {}
        for path in collect:
            with contextlib.suppress(OSError):
                read[path] = await self.read(path, limit)
        return Fresh(code, out[:limit].decode(errors="replace"), read)

    def captures(self) -> dict[str, str]:
        return self.program.captures

    async def capture(self, images: Path) -> None:
        """Capture files and processes at one moment. Raises `SandboxError`."""
        argv = self.program.capture_command(self.folder, images)
        await self._expect(argv, f"{self.program.PROGRAM}: no capture within {START_S:g} s")

    async def _expect(self, argv: list[str], late: str) -> None:
        """Run a command that must succeed. Raises `SandboxError`; `late`: its text at a timeout."""
        try:
            code, _, words = await self._run(argv, b"", START_S)
        except TimeoutError:
            raise SandboxError(late) from None
        if code:
            raise SandboxError(f"{shlex.join(argv)}: {words.strip()[-500:]}")

    async def _end_session(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        for argv in self.program.end_commands(self.folder):
            with contextlib.suppress(TimeoutError, FileNotFoundError):
                await self._run(argv, b"", END_S)
        loop = asyncio.get_running_loop()
        for fd in (self.commands, self.output, self.codes):
            if fd >= 0:
                # The next session's pipes may get these numbers, so no reader may be left.
                loop.remove_reader(fd)
                loop.remove_writer(fd)
                os.close(fd)
        self.commands = self.output = self.codes = -1

    async def close(self) -> None:
        await self._end_session()
        await asyncio.to_thread(shutil.rmtree, self.folder, True)


async def _until_nul(fd: int, words: bytearray) -> None:
    """Read a pipe into `words` up to a NUL, `FIRST_BYTES` or the pipe's end."""
    loop, done = asyncio.get_running_loop(), asyncio.get_running_loop().create_future()

    def read() -> None:
        data = os.read(fd, 4096)
        words.extend(data)
        ended = not data or data.endswith(b"\0") or len(words) >= FIRST_BYTES
        if ended and not done.done():
            done.set_result(None)

    loop.add_reader(fd, read)
    try:
        await done
    finally:
        loop.remove_reader(fd)


def _settings_removal(image: str | None) -> str:
    """Return the command that removes entries of `/` that match `check.SETTINGS`, except those of
    the image. If the image is one file, its entries are unknown here, so all folders stay."""
    whole = image is None or os.path.isdir(image)
    names = os.listdir(image) if image is not None and whole else []
    kept = "|".join(["''", *(shlex.quote(name) for name in names if check.is_setting(name))])
    remove = "rm -rf" if whole else "rm -f"
    return (
        f"(cd / && for f in {' '.join(check.SETTINGS)}; do case $f in {kept}) ;; "
        f'*) {remove} -- "$f" 2>/dev/null;; esac; done)'
    )
