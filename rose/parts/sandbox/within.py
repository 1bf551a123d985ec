"""Work of the keeper's children in a sandbox's namespaces: the start of a check (check.py), a
capture, and a restore of captured processes.

A child of the keeper joins the namespaces and forks another child. The latter does the work and
writes the result as JSON to a pipe of the host. When the host closes its end of the pipe, for
example at a deadline, both are killed.
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

from rose.parts.sandbox import kernel, layer, unread
from rose.parts.sandbox.criu import Criu, CriuError, Opened, open_program
from rose.parts.sandbox.trace import Stopped

FULL = (errno.EAGAIN, errno.ENOMEM)
# Seconds for a capture to end after its deadline. A CRIU that is killed while it writes a process
# may leave that process broken (measured).
GRACE_S = 20.0
FAILURE_BYTES = 4000  # most bytes of an error, less than a pipe holds


def enter(
    spaces: list[int], new: int, to: int, work: Callable[[], None], grace_s: float = 0.0
) -> NoReturn:
    """Run `work` in a child of this process, in the namespaces `spaces` (file descriptors, the user
    namespace first) and in new namespaces `new` (flags of unshare). Send errors to the pipe `to`.
    `grace_s`: seconds that `work` may continue after the host has closed its end."""
    try:
        for space in spaces:
            kernel.join(space)
        os.setresgid(0, 0, 0)
        os.setresuid(0, 0, 0)
        if new:
            kernel.unshare(new)
        outer = os.pidfd_open(os.getpid())
        inner = os.fork()
        if inner == 0:
            try:
                kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
                # If the parent was killed before this call, no signal comes, so check for that.
                if not select.select([outer], [], [], 0)[0]:
                    os.close(outer)
                    work()
            finally:
                os._exit(0)
        kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)  # unset by the change of users
        ended, poll = os.pidfd_open(inner), select.poll()
        poll.register(ended, select.POLLIN)
        poll.register(to, 0)  # error event when the host has closed its end
        poll.poll()
        select.select([ended], [], [], grace_s)
        os.kill(inner, signal.SIGKILL)
        os.waitpid(inner, 0)
    except OSError as error:
        _send(to, failed(error))
    finally:
        os._exit(0)


def capture(order: dict[str, Any], cache: str, spaces: list[int], fds: list[int]) -> NoReturn:
    """Capture a sandbox. `fds`: the upper layer, the folders for contents and for CRIU's images,
    the files of the new and of an earlier listing, and the pipe for the result."""
    upper, data, images, listing, since, to = fds
    opened = _open_criu(order, cache, to)

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
            if unread.terminal_too_full({1, os.getpid()}):
                raise CriuError("a terminal has more unread than CRIU can bring back")
            Criu(opened, images).dump(order["session"], copy)
        with os.fdopen(listing, "w", encoding="utf-8") as file:
            json.dump(made.entries, file)
        found = {"bytes": made.bytes, "running": names, "lost": unread.not_captured()}
        _send(to, found | {"last_pid": last_pid})

    enter(spaces, 0, to, lambda: _report_failure(to, work), GRACE_S)


def revive(order: dict[str, Any], cache: str, spaces: list[int], fds: list[int]) -> NoReturn:
    """Restore captured processes. `fds`: folder of CRIU's images, and pipe for the result."""
    images, to = fds
    opened = _open_criu(order, cache, to)

    def work() -> None:
        assert opened is not None
        _send(to, {"pid": Criu(opened, images).restore()})

    enter(spaces, 0, to, lambda: _report_failure(to, work))


def _open_criu(order: dict[str, Any], cache: str, to: int) -> Opened | None:
    """Open CRIU's files; None if the order needs no CRIU. If that fails, report it and exit."""
    try:
        return open_program(order["criu"], cache) if order["criu"] else None
    except OSError as error:
        _send(to, {"failed": str(error)})
        os._exit(1)


def _names(spare: set[int]) -> list[str]:
    """Return the names of all processes except `spare`."""
    found = []
    for pid in os.listdir("/proc"):
        if pid.isdigit() and int(pid) not in spare:
            with (
                contextlib.suppress(OSError),
                open(f"/proc/{pid}/comm", errors="replace", encoding="utf-8") as file,
            ):
                found.append(file.read().rstrip("\n"))
    return found


def _report_failure(to: int, work: Callable[[], None]) -> None:
    """Call `work`; if it fails, send the error to the host."""
    try:
        work()
    except Exception as error:  # any failure is reported to the host
        _send(to, failed(error))


def failed(error: Exception) -> dict[str, Any]:
    """Return the result for `error`. `full`: a resource was used up, perhaps by the agent."""
    full = isinstance(error, MemoryError) or getattr(error, "errno", 0) in FULL
    words = str(error) if isinstance(error, CriuError) else f"{type(error).__name__}: {error}"
    return {"failed": words[:FAILURE_BYTES], "full": full}


def _send(to: int, answer: dict[str, Any]) -> None:
    os.write(to, json.dumps(answer).encode())
