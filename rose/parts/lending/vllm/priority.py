"""Lower the priority of the rollout engine's threads on a CPU.

This is not used on a GPU, where kernels of two processes alternate whatever their priorities.

With Linux's SCHED_IDLE, these threads get 0.3% of a core that another thread wants. While the
online engine keeps the cores busy, a rollout step may not end for a long time, and memory is only
released between steps. So the online engine raises the threads to the normal priority while it
waits for memory. The user must be allowed to do that (root, or an RLIMIT_NICE of 20 or more).
Otherwise the threads only get a nice value of 19, with which each gets 1/69 of a core that it
shares with one thread of normal priority.

SCHED_IDLE and nice values only rank threads of one session, because Linux's autogroups first divide
cores between sessions. So `rose serve` keeps both engines in one session.
"""

from __future__ import annotations

import contextlib
import os
import threading

NICE = 19


class Priority:
    """Lowers the priority of this process's threads, except one; new threads inherit it."""

    def __init__(self, except_for: int | None = None) -> None:
        self._except_for = except_for
        self._may_raise_again = may_raise_again()

    def lower(self) -> None:
        """Lower the priority. The computing thread calls this; it is cheap if nothing changes."""
        if self._may_raise_again and os.sched_getscheduler(0) == os.SCHED_IDLE:
            return
        if not self._may_raise_again and os.getpriority(os.PRIO_PROCESS, 0) == NICE:
            return
        lower_priority(os.getpid(), self._may_raise_again, self._except_for)


def lower_priority(pid: int, to_idle: bool, except_for: int | None = None) -> None:
    """Lower the priority of a process's threads, except the thread `except_for`: to SCHED_IDLE if
    `to_idle`, else to the nice value NICE."""
    for thread in _threads(pid):
        with contextlib.suppress(ProcessLookupError):  # The thread has ended meanwhile.
            if thread == except_for:
                continue
            if to_idle:
                os.sched_setscheduler(thread, os.SCHED_IDLE, os.sched_param(0))
            else:
                os.setpriority(os.PRIO_PROCESS, thread, NICE)


def restore_priority(pid: int) -> None:
    """Raise another process's idle threads to the normal priority, if this user may do that."""
    with contextlib.suppress(FileNotFoundError):  # The process has ended.
        for thread in _threads(pid):
            with contextlib.suppress(OSError):  # The thread has ended, or permission is missing.
                if os.sched_getscheduler(thread) == os.SCHED_IDLE:
                    os.sched_setscheduler(thread, os.SCHED_OTHER, os.sched_param(0))
                    os.setpriority(os.PRIO_PROCESS, thread, 0)


def may_raise_again() -> bool:
    """Try with a new thread whether this user may raise a thread from SCHED_IDLE again."""
    found: list[bool] = []

    def attempt() -> None:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        try:
            os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
            found.append(True)
        except PermissionError:
            found.append(False)

    thread = threading.Thread(target=attempt)
    thread.start()
    thread.join()
    return found[0]


def _threads(pid: int) -> list[int]:
    return [int(name) for name in os.listdir(f"/proc/{pid}/task")]
