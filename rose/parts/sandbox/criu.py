"""CRIU (criu.org), which writes processes to image files and restores them from there.

It runs in a sandbox's namespaces as root of the sandbox's user namespace, but uses none of the
sandbox's files. Its loader, libraries and program are file descriptors from outside, and it reads
no settings or plugins of the agent. Requests use CRIU's own protocol (swrk, images/rpc.proto of its
source), with which files can be copied while CRIU still holds the processes that it has written.
Incremental images are not used, because they need a kernel that tracks soft-dirty pages.
"""

from __future__ import annotations

import contextlib
import functools
import glob
import os
import re
import select
import shutil
import signal
import socket
import struct
import subprocess
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

from rose.parts.sandbox import kernel, trace
from rose.parts.sandbox.backend import MIB, SandboxError

VARIABLE = "ROSE_CRIU"
NEEDED = (4, 2)  # oldest version: 4.1.1 fails on TCP sockets of Linux 6.18 (measured)
REMEDY = f"scripts/get_criu.sh gets it, or name it in {VARIABLE}"
ASK_S = 10.0  # seconds for `--version`, and for CRIU to exit after its answer
LOG_BYTES = 64 * 1024  # most bytes kept of a log, from its end
LOG_LINES = 4  # most errors of a log in a message
DUMP, RESTORE, NOTIFY = 1, 2, 6  # criu_req_type
IGNORE_GROUPS, SKIP_LOCK, WARNINGS = 0, 3, 2


@dataclass(frozen=True)
class Program:
    """An installed CRIU. `libraries`: the only folders that its loader searches."""

    loader: str
    libraries: tuple[str, ...]
    program: str
    version: str


def prefix() -> Path:
    """Return the folder in which scripts/get_criu.sh installs CRIU."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(cache) / "rose" / "criu"


def find() -> Program:
    """Return the installed CRIU. The search runs once per process. Raises `SandboxError`."""
    found = _find()
    if isinstance(found, str):
        raise SandboxError(found)
    return found


@functools.cache
def _find() -> Program | str:
    named = os.environ.get(VARIABLE)
    places = [named] if named else [str(prefix() / "criu"), shutil.which("criu")]
    problems = []
    for place in filter(None, places):
        if os.path.isdir(place):
            place = f"{place}/criu"
        if not os.access(place, os.X_OK):
            problems.append(f"{place} is not there")
            continue
        try:
            return _program_at(place)
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            problems.append(f"{place}: {error}")
    return f"no CRIU: {'; '.join(problems) or 'not installed'}; {REMEDY}"


def _program_at(place: str) -> Program:
    """Return the CRIU at `place`. Raises OSError, ValueError, `subprocess.SubprocessError`."""
    own = Path(place).resolve().parent / "root"
    program = str(own / "usr/sbin/criu")
    if os.path.exists(program):  # installed by get_criu.sh
        libraries = tuple(glob.glob(f"{own}/usr/lib/*-linux-gnu"))
        loaders = glob.glob(f"{own}/usr/lib/*/ld-linux-*.so.*")
        if not (libraries and loaders):
            raise ValueError("an incomplete folder: remove it")
        loader = loaders[0]
    else:
        program, loader = place, interpreter(place)
        said = _output_of(loader, "--list", program)
        libraries = tuple(dict.fromkeys(re.findall(r"=> (/\S+)/[^/\s]+ \(", said)))
    said = _output_of(loader, "--library-path", ":".join(libraries), program, "--version")
    version = re.search(r"Version: (\d+)\.(\d+)(\S*)", said)
    if version is None:
        raise ValueError(f"it names no version but {said.strip()!r}")
    if (int(version[1]), int(version[2])) < NEEDED:
        raise ValueError(f"version {version[1]}.{version[2]}; at least 4.2 is needed")
    return Program(loader, libraries, program, said.split()[1])


def _output_of(*argv: str) -> str:
    done = subprocess.run(argv, capture_output=True, text=True, timeout=ASK_S)
    if done.returncode:
        raise ValueError(done.stderr.strip()[-300:] or f"exit code {done.returncode}")
    return done.stdout


def interpreter(path: str) -> str:
    """Return the loader that the ELF program at `path` names. Raises ValueError."""
    with open(path, "rb") as file:
        head = file.read(64)
        if head[:5] != b"\x7fELF\x02":
            raise ValueError("no program of 64 bits")
        offset, size, count = (
            *struct.unpack_from("Q", head, 32),
            *struct.unpack_from("HH", head, 54),
        )
        for i in range(count):
            file.seek(offset + i * size)
            kind, _, at, _, _, length = struct.unpack("IIQQQQ", file.read(40))
            if kind == 3:  # PT_INTERP
                file.seek(at)
                return file.read(length).rstrip(b"\0").decode()
    raise ValueError("linked statically: no loader is named")


def order() -> dict[str, Any]:
    """Return the installed CRIU as JSON values for `open_program`. Raises `SandboxError`."""
    return asdict(find())


# --------------------------------------------------------------------------- in the sandbox


@dataclass(frozen=True)
class Opened:
    """File descriptors of an installed CRIU."""

    loader: int
    libraries: tuple[int, ...]
    program: int
    cache: int  # a folder on a tmpfs, where CRIU caches this kernel's features


def open_program(found: dict[str, Any], cache: str) -> Opened:
    """Open CRIU's files before the sandbox's mount namespace is joined. Raises OSError."""
    folders = tuple(os.open(path, os.O_PATH | os.O_DIRECTORY) for path in found["libraries"])
    loader, program = (os.open(found[name], os.O_RDONLY) for name in ("loader", "program"))
    return Opened(loader, folders, program, os.open(cache, os.O_RDONLY | os.O_DIRECTORY))


class CriuError(Exception):
    """CRIU failed. The message has the last errors of its log."""


class Criu:
    """Sends requests, each to a new CRIU process. `dump` and `restore` raise `CriuError`."""

    def __init__(self, opened: Opened, images: int) -> None:
        self.opened, self.images = opened, images
        self._problem = ""
        self._log = b""

    def dump(self, session: int, on_held: Callable[[], None]) -> None:
        """Write `session` and its descendants to images. When they are written and still stopped,
        call `on_held`. After its return, the processes continue."""
        options = _options(self.images) + [(2, session), (3, 1)]
        answer = self._request(DUMP, options, on_held)
        if not answer.get(2):
            raise self._failure("can't write the processes")

    def restore(self) -> int:
        """Restore the processes, and return the session's process id."""
        answer = self._request(RESTORE, _options(self.images), None)
        if not answer.get(2):
            raise self._failure("can't make the processes again")
        return decode(answer[4])[1]

    def _failure(self, what: str) -> CriuError:
        lines = [
            line for line in self._log.decode(errors="replace").splitlines() if "Error" in line
        ]
        words = self._problem or "; ".join(lines[-LOG_LINES:]) or "it ended without a message"
        return CriuError(f"CRIU {what}: {words}")

    def _request(
        self, kind: int, options: list[tuple[int, Any]], on_held: Callable[[], None] | None
    ) -> dict[int, Any]:
        """Start CRIU, send it one request of this kind, and return its result."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                self._exec_criu(theirs, write, listen=kind == DUMP)
            finally:
                os._exit(127)
        theirs.close()
        os.close(write)
        try:
            listener = -1
            if kind == DUMP and kernel.SECCOMP is not None:
                _, fds, _, _ = socket.recv_fds(ours, 1, 1)
                listener = fds[0]
            if on_held is not None:
                options = [*options, (12, 1)]
            ours.send(encode([(1, kind), (2, encode(options))]))
            return self._serve(ours, read, listener, on_held)
        finally:
            ours.close()
            with contextlib.suppress(ProcessLookupError):
                # CRIU exits after its answer; kill it if it has not answered or doesn't exit.
                if not _exits_within(pid, ASK_S):
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
            os.close(read)

    def _exec_criu(self, channel: socket.socket, log: int, listen: bool) -> NoReturn:
        """Replace this forked process by CRIU, which serves `channel` and writes errors to `log`.
        `listen`: first send the parent a listener for calls about filters (`trace.notify`)."""
        kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
        os.dup2(os.open("/dev/null", os.O_RDWR), 0)
        os.dup2(0, 1)
        os.dup2(log, 2)
        own = self.opened
        if listen and kernel.SECCOMP is not None:
            listener = trace.notify()
            socket.send_fds(channel, [b"l"], [listener])
            os.close(listener)
        for fd in (*own.libraries, own.program, own.cache, self.images, channel.fileno()):
            os.set_inheritable(fd, True)
        folders = ":".join(f"/proc/self/fd/{fd}" for fd in own.libraries)
        cache = f"/proc/self/fd/{own.cache}"
        program = f"/proc/self/fd/{own.program}"
        argv = ["criu", "--inhibit-cache", "--library-path", folders, program]
        argv += ["--no-default-config", "swrk", str(channel.fileno())]
        os.execve(own.loader, argv, {"XDG_RUNTIME_DIR": cache, "CRIU_LIBS_DIR": cache})

    def _serve(
        self, channel: socket.socket, log: int, listener: int, on_held: Callable[[], None] | None
    ) -> dict[int, Any]:
        """Answer CRIU's notifications and keep its log. Return its result, {} if there is none."""
        program = kernel.filter_program() if listener >= 0 else b""
        poll = select.poll()
        for fd in (channel.fileno(), log, *([listener] if listener >= 0 else [])):
            poll.register(fd, select.POLLIN)
        while True:
            for fd, event in poll.poll():
                if fd == log:
                    data = os.read(log, 1 << 16)
                    self._log = (self._log + data)[-LOG_BYTES:]
                    if not data:
                        poll.unregister(log)
                elif fd == listener and event & select.POLLIN:
                    trace.answer(listener, program, self._on_foreign_filter)
                elif fd == listener:
                    poll.unregister(listener)
                else:
                    data = channel.recv(1 << 16)
                    answer = decode(data)
                    if not data or answer[1] != NOTIFY:
                        return answer
                    if on_held is not None and decode(answer[5]).get(1) == b"post-dump":
                        on_held()
                    channel.send(encode([(1, NOTIFY), (3, 1)]))

    def _on_foreign_filter(self, task: int) -> None:
        self._problem = f"thread {task} has a filter of system calls of its own"


def _exits_within(pid: int, wait_s: float) -> bool:
    descriptor = os.pidfd_open(pid)
    ready, _, _ = select.select([descriptor], [], [], wait_s)
    os.close(descriptor)
    if ready:
        os.waitpid(pid, 0)
    return bool(ready)


def _options(images: int) -> list[tuple[int, Any]]:
    """Return fields of `criu_opts` as (number, value)."""
    return [
        (1, -1),
        (68, f"/proc/self/fd/{images}".encode()),
        (4, 1),  # unix sockets between these processes and others
        (5, 1),  # established TCP connections
        (8, 1),  # file locks
        (9, WARNINGS),
        (18, 1),  # open files that lost the opened name but have another
        (34, IGNORE_GROUPS),
        (35, 256 * MIB),  # most bytes of a removed file that is still open
        (64, SKIP_LOCK),
        (67, 1),  # the rights of a user namespace
        (71, 1),  # log to standard error
    ]


def encode(fields: list[tuple[int, Any]]) -> bytes:
    """Encode a protobuf message of whole numbers and bytes."""
    made = b""
    for number, value in fields:
        if isinstance(value, bytes):
            made += _varint(number << 3 | 2) + _varint(len(value)) + value
        else:
            made += _varint(number << 3) + _varint(value % (1 << 64))
    return made


def _varint(value: int) -> bytes:
    """Encode a whole number as a varint of protobuf."""
    made = bytearray()
    while value > 0x7F:
        made.append(value & 0x7F | 0x80)
        value >>= 7
    made.append(value)
    return bytes(made)


def decode(data: bytes) -> dict[int, Any]:
    """Decode a protobuf message into field number -> last value. Raises ValueError."""
    found: dict[int, Any] = {}
    at = 0

    def read_varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            value |= (data[at] & 0x7F) << shift
            at, shift = at + 1, shift + 7
            if data[at - 1] < 0x80:
                return value

    try:
        while at < len(data):
            key = read_varint()
            if key & 7 == 0:
                found[key >> 3] = read_varint()
            elif key & 7 == 2:
                size = read_varint()
                found[key >> 3], at = data[at : at + size], at + size
                if at > len(data):
                    raise IndexError
            else:
                raise ValueError(f"field {key >> 3} has the wire type {key & 7}")
    except IndexError:
        raise ValueError("a message of CRIU's that ends too early") from None
    return found
