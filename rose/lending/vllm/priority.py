"""Lower the priority of the rollout engine's threads on a CPU.

This does nothing on a GPU, where kernels of two processes take turns whatever their priorities.

They run where no other wants the core (Linux's SCHED_IDLE). But behind an online engine that keeps
the core a step would take any time to end, and memory is given back between steps: so the online
engine gives them the common priority while it waits for memory, where its user may (root, or an
RLIMIT_NICE of 20 or more). Where he may not, they are only made nice: a sixty-eighth of the core is
theirs in any case. Either way counts within one session alone, as Linux's autogroups share cores
between sessions whatever their threads' priorities; rose.serving keeps both engines in one.
"""

from __future__ import annotations

import contextlib
import os
import threading

NICE = 19


class Priority:
    """Of all threads of this process but one, and of those that they make."""

    def __init__(self, except_for: int | None = None) -> None:
        self._except_for = except_for
        self._may_return = may_return()

    def lower(self) -> None:
        """From the thread that computes. Cheap when nothing has changed."""
        if self._may_return and os.sched_getscheduler(0) == os.SCHED_IDLE:
            return
        if not self._may_return and os.getpriority(os.PRIO_PROCESS, 0) == NICE:
            return
        lower_priority(os.getpid(), self._may_return, self._except_for)


def lower_priority(pid: int, to_idle: bool, except_for: int | None = None) -> None:
    """The threads of a process but one. `to_idle`: as `may_return` says."""
    for thread in _threads(pid):
        with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
            if thread == except_for:
                continue
            if to_idle:
                os.sched_setscheduler(thread, os.SCHED_IDLE, os.sched_param(0))
            else:
                os.setpriority(os.PRIO_PROCESS, thread, NICE)


def restore_priority(pid: int) -> None:
    """Another process' threads, to the common priority for now; nothing where this user may not."""
    with contextlib.suppress(OSError):
        for thread in _threads(pid):
            if os.sched_getscheduler(thread) == os.SCHED_IDLE:
                os.sched_setscheduler(thread, os.SCHED_OTHER, os.sched_param(0))
                os.setpriority(os.PRIO_PROCESS, thread, 0)


def may_return() -> bool:
    """Whether a thread of this user comes back from SCHED_IDLE; tried on one of no use."""
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
