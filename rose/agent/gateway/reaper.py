"""Runs one program, and ends whatever it has started when it ends: no trajectory leaves a process.

    python -I rose/agent/gateway/reaper.py COMMAND...

A process may leave its group and session and clear its environment, but not its ancestors: Linux
gives one whose parent has ended to the nearest ancestor that is a subreaper (prctl(2)). So the
reaper stays between the host and the program. Once the program has ended, or the reaper gets
SIGTERM, it kills its children, and theirs as they come to it, until there is none. It ends with the
program's code, 128 + N for a program that signal N ended. It gets SIGTERM, too, when the process
that started it ends. Imports nothing of ROSE, so that it starts within milliseconds.
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
END_S = 5.0  # Killed processes are gone within milliseconds, unless the kernel holds them.
LOOK_S = 0.02  # The end of others may bring further processes between two looks.
HEARD = (signal.SIGTERM, signal.SIGCHLD)
PRCTL = ctypes.CDLL(None).prctl  # found here: after fork() nothing should be looked up


def run(program: Callable[[], NoReturn], parent: int) -> NoReturn:
    """Run `program` in a child that leads a session of its own. The calling process must have no
    threads, and been forked for this by `parent`."""
    signal.pthread_sigmask(signal.SIG_BLOCK, HEARD)
    PRCTL(PR_SET_CHILD_SUBREAPER, 1)
    PRCTL(PR_SET_PDEATHSIG, signal.SIGTERM)
    own = os.getpid()
    if os.getppid() != parent:
        os._exit(128 + signal.SIGTERM)
    child = os.fork()
    if not child:
        os.setsid()
        PRCTL(PR_SET_PDEATHSIG, signal.SIGKILL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, HEARD)
        if os.getppid() == own:
            program()
        os._exit(1)
    code = None
    while code is None:
        heard = signal.sigwait(HEARD)
        code = 128 + heard if heard == signal.SIGTERM else _reap(child)
    _end_children()
    os._exit(code)


def _reap(child: int) -> int | None:
    """Take the codes of all that have ended. Return `child`'s; None while it runs."""
    code = None
    with suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == child:
                code = os.waitstatus_to_exitcode(ended[1])
    return code if code is None or code >= 0 else 128 - code


def _end_children() -> None:
    """Kill children until there is none, for `END_S` at most."""
    until = time.monotonic() + END_S
    while time.monotonic() < until:
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        for pid in _children():
            with suppress(OSError):  # It has ended, or is another user's, as below sudo.
                os.kill(pid, signal.SIGKILL)
        signal.sigtimedwait([signal.SIGCHLD], LOOK_S)


def _children() -> list[int]:
    own = os.getpid()
    try:
        with open(f"/proc/{own}/task/{own}/children", encoding="ascii") as file:
            return [int(pid) for pid in file.read().split()]
    except OSError:  # a kernel without CONFIG_PROC_CHILDREN
        return [
            pid for pid in map(int, filter(str.isdecimal, os.listdir("/proc"))) if _is_of(own, pid)
        ]


def _is_of(parent: int, pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[1]) == parent
    except OSError:
        return False


def main() -> NoReturn:
    command = sys.argv[1:]

    def become() -> NoReturn:
        for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them.
            signal.signal(number, signal.SIG_DFL)
        try:
            os.execvp(command[0], command)
        except OSError as error:
            print(f"{command[0]}: {error.strerror}", file=sys.stderr, flush=True)
            os._exit(127)

    run(become, os.getppid())


if __name__ == "__main__":
    main()
