"""Run one program, and when it ends, end every process that it has started.

    python -I rose/parts/adapters/gateway/reaper.py COMMAND...

A process may leave its group and session and clear its environment, but it can't leave its
ancestors. If its parent ends, the nearest ancestor that is a subreaper (prctl(2)) becomes its
parent. So the reaper stays between the host and the program. When the program ends, or the reaper
gets SIGTERM, the reaper kills its children until none is left. Orphans of a killed child become
children of the reaper, and are killed next. The reaper ends with the program's exit code, 128 + N
if signal N ended the program. The kernel sends it SIGTERM when the process that started it ends.
The reaper imports nothing of ROSE, so that it starts in milliseconds.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
END_S = 5.0  # most seconds of killing; milliseconds unless the kernel blocks a child
POLL_S = 0.02  # seconds between two polls for children, such as new orphans
HANDLED = (signal.SIGTERM, signal.SIGCHLD)
PRCTL = ctypes.CDLL(None).prctl  # resolved at import, because dlsym() is not safe after fork()


def run(program: Callable[[], NoReturn], parent: int) -> NoReturn:
    """Run `program` in a child that leads its own session, and become its reaper. The calling
    process must have no other threads. `parent`: process id of its parent."""
    signal.pthread_sigmask(signal.SIG_BLOCK, HANDLED)
    PRCTL(PR_SET_CHILD_SUBREAPER, 1)
    PRCTL(PR_SET_PDEATHSIG, signal.SIGTERM)
    own = os.getpid()
    if os.getppid() != parent:
        os._exit(128 + signal.SIGTERM)
    child = os.fork()
    if not child:
        os.setsid()
        PRCTL(PR_SET_PDEATHSIG, signal.SIGKILL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDLED)
        if os.getppid() == own:
            program()
        os._exit(1)
    code = None
    while code is None:
        received = signal.sigwait(HANDLED)
        code = 128 + received if received == signal.SIGTERM else _reap(child)
    _end_children()
    os._exit(code)


def _reap(child: int) -> int | None:
    """Reap all ended children. Return the exit code of `child`; None while it runs."""
    code = None
    with suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == child:
                code = os.waitstatus_to_exitcode(ended[1])
    return code if code is None or code >= 0 else 128 - code


def _end_children() -> None:
    """Kill children until none is left, for at most `END_S`."""
    until = time.monotonic() + END_S
    while time.monotonic() < until:
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        for pid in _children():
            with suppress(OSError):  # has ended, or has another user, as below sudo
                os.kill(pid, signal.SIGKILL)
        signal.sigtimedwait([signal.SIGCHLD], POLL_S)


def _children() -> list[int]:
    own = os.getpid()
    try:
        with open(f"/proc/{own}/task/{own}/children", encoding="ascii") as file:
            return [int(pid) for pid in file.read().split()]
    except OSError:  # a kernel without CONFIG_PROC_CHILDREN
        pids = map(int, filter(str.isdecimal, os.listdir("/proc")))
        return [pid for pid in pids if _is_child(own, pid)]


def _is_child(parent: int, pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[1]) == parent
    except OSError:
        return False


def main() -> NoReturn:
    command = sys.argv[1:]

    def execute() -> NoReturn:
        for number in (signal.SIGPIPE, signal.SIGXFSZ):  # ignored by Python
            signal.signal(number, signal.SIG_DFL)
        try:
            os.execvp(command[0], command)
        except OSError as error:
            print(f"{command[0]}: {error.strerror}", file=sys.stderr, flush=True)
            os._exit(127)

    run(execute, os.getppid())


if __name__ == "__main__":
    main()
