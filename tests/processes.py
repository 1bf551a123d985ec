"""Processes that a test looks at or ends, while they end, fork, turn zombie or become unreadable
between any two calls. A zombie counts as ended: whoever should reap it may be a container's init
that reaps nothing."""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from signal import SIGKILL

import psutil

DEADLINE_S = 120.0
POLL_S = 0.02
STILL = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
# Files of /proc vanish while they are read, which psutil doesn't always tell from another error.
VANISHED = (psutil.Error, OSError)


def ran(command, **more) -> subprocess.CompletedProcess:
    """The output of a program that has ended."""
    return subprocess.run(command, capture_output=True, text=True, **more)


def until(condition: Callable[[], object], what: str, within_s: float = DEADLINE_S):
    """Polls until `condition` holds; its value."""
    end = time.monotonic() + within_s
    while not (value := condition()):
        assert time.monotonic() < end, f"waited {within_s:g} s for {what}"
        time.sleep(POLL_S)
    return value


def alive(process: int | psutil.Process) -> bool:
    """Whether it has not ended. A `psutil.Process` is known by its start, a pid may be reused."""
    with contextlib.suppress(*VANISHED):
        known = psutil.Process(process) if isinstance(process, int) else process
        return known.is_running() and known.status() not in (
            psutil.STATUS_ZOMBIE,
            psutil.STATUS_DEAD,
        )
    return False


def opened(path: Path) -> int:
    """Number of this process's descriptors of a file."""
    return [file.path for file in psutil.Process().open_files()].count(str(path))


def words(process: psutil.Process) -> list[str]:
    """Its command line; empty of one that has ended."""
    with contextlib.suppress(*VANISHED):
        return process.cmdline()
    return []


def name(process: psutil.Process) -> str:
    """The name of a process; "" if it has ended."""
    with contextlib.suppress(*VANISHED):
        return process.name()
    return ""


def parent(process: psutil.Process) -> int:
    """Its pid; 0 of one that has ended."""
    with contextlib.suppress(*VANISHED):
        return process.ppid()
    return 0


def listens(process: psutil.Process) -> list[tuple[str, int]]:
    """The TCP addresses at which it takes connections."""
    with contextlib.suppress(*VANISHED):
        found = process.net_connections("tcp")
        return [each.laddr for each in found if each.status == psutil.CONN_LISTEN]
    return []


def bearing(*marks: str) -> list[psutil.Process]:
    """The living processes of this machine that have each of `marks` within their command line."""
    found = [each for each in _all() if all(mark in " ".join(words(each)) for mark in marks)]
    return [each for each in found if alive(each)]


def _all() -> Iterator[psutil.Process]:
    for pid in psutil.pids():
        with contextlib.suppress(*VANISHED):
            yield psutil.Process(pid)


def children(pid: int | None = None, recursive: bool = False) -> list[psutil.Process]:
    """The living children of a process (None: this one), or all of its living descendants."""
    with contextlib.suppress(*VANISHED):
        return [each for each in psutil.Process(pid).children(recursive=recursive) if alive(each)]
    return []


def signal(process: int | psutil.Process, number: int) -> None:
    """To one that may have ended."""
    with contextlib.suppress(*VANISHED):
        known = psutil.Process(process) if isinstance(process, int) else process
        known.send_signal(number)


def kill(process: int | psutil.Process) -> None:
    """SIGKILL, if it has not ended."""
    signal(process, SIGKILL)


def kill_family(pid: int, itself: bool = True) -> None:
    """SIGKILL to all descendants of a process, and to it, as when a machine loses power: all are
    stopped first, so that none of them forks another or answers another's end."""
    family: dict[int, psutil.Process] = {}
    while fresh := [each for each in _family(pid, itself) if each.pid not in family]:
        for each in fresh:
            family[each.pid] = each
            with contextlib.suppress(*VANISHED):
                each.suspend()
                until(lambda one=each: not alive(one) or one.status() in STILL, f"{each} to stop")
    for each in family.values():
        kill(each)


def _family(pid: int, itself: bool) -> list[psutil.Process]:
    with contextlib.suppress(*VANISHED):
        return [psutil.Process(pid)] * itself + children(pid, recursive=True)
    return []


def resident_bytes(pid: int) -> int:
    """Resident memory of process `pid`, shared pages included; exact, unlike /proc/PID/statm.
    Raises `OSError` when the process has ended or belongs to another user."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="utf-8").splitlines():
        if line.startswith("Rss:"):
            return int(line.split()[1]) * 1024
    raise ProcessLookupError(f"process {pid} has ended")


def left(find: Callable[[], Iterable], within_s: float = DEADLINE_S) -> list:
    """What `find` still finds when the deadline passes; returns at once when it finds nothing."""
    with contextlib.suppress(AssertionError):
        until(lambda: not list(find()), "their end", within_s)
    return list(find())
