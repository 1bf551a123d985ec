"""What the keeper's children do within a sandbox's namespaces, but for its process 1: the frame of
a check (check.py), of a capture and of what brings captured processes back.

A child joins the namespaces and forks one that works in them; what that one has to say goes as JSON
into a pipe of the host's. When the host closes its end, both are ended: a deadline.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import select
import signal
from collections.abc import Callable
from typing import Any, NoReturn

from rose.sandbox import kernel, layer, unread
from rose.sandbox.criu import Criu, CriuError, Opened, open_program
from rose.sandbox.trace import Stopped

FULL = (errno.EAGAIN, errno.ENOMEM)
GRACE_S = 20.0  # a CRIU that is killed while it writes a process may leave it broken (measured)
FAILURE_BYTES = 4000  # of a message: less than a pipe holds


def enter(
    spaces: list[int], new: int, to: int, work: Callable[[], None], grace_s: float = 0.0
) -> NoReturn:
    """In a child of the keeper: `work` in another one, in the namespaces `spaces` (file
    descriptors, the user namespace first) and in `new` ones. Errors go to `to`. `grace_s`: how long
    it may go on when the host has given up."""
    try:
        for space in spaces:
            kernel.join(space)
        os.setresgid(0, 0, 0)
        os.setresuid(0, 0, 0)
        if new:
            kernel.unshare(new)
        inner = os.fork()
        if inner == 0:
            try:
                kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
                work()
            finally:
                os._exit(0)
        kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)  # changing users has unset it
        ended, poll = os.pidfd_open(inner), select.poll()
        poll.register(ended, select.POLLIN)
        poll.register(to, 0)  # an error once the host has given up and closed its end
        poll.poll()
        select.select([ended], [], [], grace_s)
        os.kill(inner, signal.SIGKILL)
        os.waitpid(inner, 0)
    except OSError as error:
        _say(to, failed(error))
    finally:
        os._exit(0)


def capture(order: dict[str, Any], cache: str, spaces: list[int], fds: list[int]) -> NoReturn:
    """`fds`: the upper layer, folders for contents and for CRIU's images, files for the listing
    and of an earlier one, and where the result goes."""
    upper, data, images, listing, since, to = fds
    opened = _program(order, cache, to)

    def work() -> None:
        with os.fdopen(since, encoding="utf-8") as file:
            text = file.read()
        known = {entry["path"]: entry for entry in json.loads(text)} if text else {}
        made = layer.Recorder(data, known, layer.mapped() if known else frozenset())
        names = _names({1, order["session"], os.getpid()})
        with open("/proc/sys/kernel/ns_last_pid", encoding="utf-8") as file:
            last_pid = int(file.read())

        def copy() -> None:
            made.record(upper, ".")
            with contextlib.suppress(OSError):
                made.record(os.open("/dev/shm", os.O_DIRECTORY | os.O_NOFOLLOW), layer.SHARED)

        if opened is None:
            with Stopped({1}):
                copy()
        else:
            if unread.terminals({1, os.getpid()}):
                raise CriuError("a terminal has more unread than CRIU can bring back")
            Criu(opened, images).dump(order["session"], copy)
        with os.fdopen(listing, "w", encoding="utf-8") as file:
            json.dump(made.entries, file)
        found = {"bytes": made.bytes, "running": names, "lost": unread.not_captured()}
        _say(to, found | {"last_pid": last_pid})

    enter(spaces, 0, to, lambda: _telling(to, work), GRACE_S)


def revive(order: dict[str, Any], cache: str, spaces: list[int], fds: list[int]) -> NoReturn:
    """`fds`: the folder of CRIU's images, and where the result goes."""
    images, to = fds
    opened = _program(order, cache, to)

    def work() -> None:
        assert opened is not None
        _say(to, {"pid": Criu(opened, images).restore()})

    enter(spaces, 0, to, lambda: _telling(to, work))


def _program(order: dict[str, Any], cache: str, to: int) -> Opened | None:
    try:
        return open_program(order["criu"], cache) if order["criu"] else None
    except OSError as error:
        _say(to, {"failed": str(error)})
        os._exit(1)


def _names(but: set[int]) -> list[str]:
    """The programs that run, but for these processes."""
    found = []
    for pid in os.listdir("/proc"):
        if pid.isdigit() and int(pid) not in but:
            with (
                contextlib.suppress(OSError),
                open(f"/proc/{pid}/comm", errors="replace", encoding="utf-8") as file,
            ):
                found.append(file.read().rstrip("\n"))
    return found


def _telling(to: int, work: Callable[[], None]) -> None:
    try:
        work()
    except Exception as error:  # whatever it is, the host must learn of it
        _say(to, failed(error))


def failed(error: Exception) -> dict[str, Any]:
    """`full`: whether it is for want of what the agent may have used up."""
    full = isinstance(error, MemoryError) or getattr(error, "errno", 0) in FULL
    words = str(error) if isinstance(error, CriuError) else f"{type(error).__name__}: {error}"
    return {"failed": words[:FAILURE_BYTES], "full": full}


def _say(to: int, answer: dict[str, Any]) -> None:
    os.write(to, json.dumps(answer).encode())
