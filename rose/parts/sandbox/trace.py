"""Stop processes for a capture, and answer CRIU's questions about filters of system calls.

`Stopped` holds the agent's processes with ptrace(2) while their files are copied. CRIU uses ptrace
to read the filter of system calls of each process. This needs CAP_SYS_ADMIN in the host's user
namespace, which no process in a sandbox has. But the filter is known: `kernel.confine` has loaded
it. So `notify` and `answer` reply to these calls in the kernel's place (seccomp's notifications).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import struct
import time
from collections.abc import Callable

from rose.parts.sandbox.kernel import LIBC

SEIZE, INTERRUPT, DETACH = 0x4206, 0x4207, 17
SETOPTIONS, GET_FILTER, GET_METADATA = 0x4200, 0x420C, 0x420D
SUSPEND_SECCOMP = 1 << 21
WALL = 0x40000000  # flag of waitpid: threads, too
STOP_S = 0.5  # seconds for all threads to stop, which takes a millisecond
POLL_S = 0.0005  # seconds between two polls of threads
PAUSE_S = 0.02  # seconds for a child of vfork to execute its program
TRIES = 20  # most attempts to stop all threads

MACHINE = os.uname().machine
CALL_SECCOMP = {"x86_64": 317, "aarch64": 277}.get(MACHINE, -1)
CALL_PTRACE = {"x86_64": 101, "aarch64": 117}.get(MACHINE, -1)
SET_MODE_FILTER, NEW_LISTENER = 1, 1 << 3
RET_NOTIFY, RET_ALLOW = 0x7FC00000, 0x7FFF0000
RECEIVE, SEND = 0xC0502100, 0xC0182101  # ioctl numbers of linux/seccomp.h
NOTICE = struct.Struct("QIIiIQ6Q")  # struct seccomp_notif
REPLY = struct.Struct("QqiI")  # struct seccomp_notif_resp
LOAD, EQUAL, ANY_BIT, RETURN = 0x20, 0x15, 0x45, 0x06  # opcodes of classic BPF
ARGUMENTS = 16  # offset of the arguments in struct seccomp_data, 8 bytes each

LIBC.ptrace.restype = ctypes.c_long


def ptrace(request: int, task: int, data: int = 0) -> None:
    """Call ptrace(2). Raises OSError."""
    done = LIBC.ptrace(request, task, ctypes.c_void_p(0), ctypes.c_void_p(data))
    if done < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"ptrace({request:#x}, {task}): {os.strerror(code)}")


def tasks(spare: set[int]) -> set[int]:
    """Return the threads of all processes in /proc except `spare`."""
    found = set()
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) not in spare:
            with contextlib.suppress(OSError):
                found.update(map(int, os.listdir(f"/proc/{name}/task")))
    return found


class Stopped:
    """Context in which only the processes `spare` run. Unlike SIGSTOP, ptrace hides the stop from
    the parents, and the stopped processes continue if this process is killed. A process that waits
    for its child of vfork(2) can't be stopped while the child is stopped. Then all processes are
    released, and stopped again after a pause."""

    def __init__(self, spare: set[int]) -> None:
        self.spare = spare | {os.getpid()}
        self.held: dict[int, int] = {}  # thread -> the signal that it was about to get
        self._asked: set[int] = set()  # threads that are to stop

    def __enter__(self) -> Stopped:
        for _ in range(TRIES):
            if self._stop_all():
                return self
            self.__exit__()
            time.sleep(PAUSE_S)
        raise OSError(
            errno.EBUSY, f"threads {sorted(self._asked)} can't be stopped, or begin others for ever"
        )

    def _stop_all(self) -> bool:
        """Stop all threads, also new ones. Return False if that takes longer than `STOP_S`."""
        until, refused = time.monotonic() + STOP_S, set()
        while time.monotonic() < until:
            new = tasks(self.spare) - set(self.held) - self._asked - refused
            if not new and not self._asked:
                return True
            for task in new:
                try:
                    ptrace(SEIZE, task)
                    ptrace(INTERRUPT, task)
                    self._asked.add(task)
                except OSError:  # ended, or held by a debugger of the agent
                    refused.add(task)
            for task in tuple(self._asked):
                self._wait(task)
            if self._asked:
                time.sleep(POLL_S)
        return False

    def _wait(self, task: int) -> None:
        """Move a thread that has stopped from `_asked` to `held`, or drop it if it has ended."""
        try:
            stopped, status = os.waitpid(task, WALL | os.WNOHANG)
        except ChildProcessError:
            stopped, status = task, 0
        if stopped:
            self._asked.discard(task)
            if os.WIFSTOPPED(status):
                self.held[task] = 0 if status >> 16 else os.WSTOPSIG(status)

    def __exit__(self, *_: object) -> None:
        for task, signal in self.held.items():
            with contextlib.suppress(OSError):  # killed meanwhile
                ptrace(DETACH, task, signal)
        self.held.clear()


def notify() -> int:
    """Make later ptrace calls of this process about filters wait for a reply. The process that gets
    the returned file descriptor replies with `answer`. Raises OSError."""
    steps = [
        (LOAD, 0, 0, 0),  # the call's number
        (EQUAL, 0, 7, CALL_PTRACE),
        (LOAD, 0, 0, ARGUMENTS),  # the request
        (EQUAL, 4, 0, GET_FILTER),
        (EQUAL, 3, 0, GET_METADATA),
        (EQUAL, 0, 3, SETOPTIONS),
        (LOAD, 0, 0, ARGUMENTS + 3 * 8),  # the options
        (ANY_BIT, 0, 1, SUSPEND_SECCOMP),
        (RETURN, 0, 0, RET_NOTIFY),
        (RETURN, 0, 0, RET_ALLOW),
    ]
    code = b"".join(struct.pack("HBBI", *step) for step in steps)
    kept = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("HxxxxxxQ", len(steps), ctypes.addressof(kept))
    made = LIBC.syscall(
        ctypes.c_long(CALL_SECCOMP), SET_MODE_FILTER, ctypes.c_ulong(NEW_LISTENER), program
    )
    if made < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"seccomp(NEW_LISTENER): {os.strerror(code)}")
    return made


def answer(listener: int, program: bytes, on_foreign: Callable[[int], None]) -> None:
    """Answer a ptrace call as if each thread had only the filter `program`. If a thread has further
    filters, call `on_foreign(thread)`, because the thread can't be captured."""
    notice = bytearray(NOTICE.size)
    try:
        fcntl.ioctl(listener, RECEIVE, notice)
    except OSError:  # the caller is gone
        return
    key, caller, _, _, _, _, request, task, index, data, *_ = NOTICE.unpack(notice)
    value, error = 0, 0
    if request == GET_METADATA:
        error = errno.EIO  # the answer of a kernel without this request
    elif request == GET_FILTER and index > 0:
        error = errno.ENOENT
    elif request == GET_FILTER:
        value = len(program) // 8
        if _filter_count(task) != 1:
            on_foreign(task)
            value, error = 0, errno.EPERM
        elif data:
            memory = os.open(f"/proc/{caller}/mem", os.O_WRONLY)
            os.pwrite(memory, program, data)
            os.close(memory)
    with contextlib.suppress(OSError):
        fcntl.ioctl(listener, SEND, REPLY.pack(key, value, -error, 0))


def _filter_count(task: int) -> int:
    """Return the number of a thread's filters; 1 if the kernel (before 5.9) doesn't report it."""
    with contextlib.suppress(OSError), open(f"/proc/{task}/status", "rb") as file:
        for line in file:
            if line.startswith(b"Seccomp_filters:"):
                return int(line.split()[1])
    return 1
