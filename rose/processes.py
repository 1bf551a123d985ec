"""No process outlives the one that started it: Linux's parent-death signal and the child subreaper.
How many threads a process may well have, and how it imports much.

Imports nothing of ROSE. Left out: other systems than Linux; ROSE's engines and MPI settings need
Linux anyway.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import math
import os
import signal
import sys
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

Result = TypeVar("Result")

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
MOST_THREADS = 8
CGROUP, OWN_GROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
LIBC = ctypes.CDLL(None, use_errno=True)  # loaded here: after fork() nothing should be looked up

# what programs need that know nothing of the run; all else stays behind
KEPT = (
    "PATH",
    "HOME",
    "USER",
    "LOGNAME",
    "SHELL",
    "LANG",
    "LANGUAGE",
    "LC_ALL",
    "LC_CTYPE",
    "TZ",
    "TMPDIR",
    "LD_LIBRARY_PATH",
    "SSL_CERT_FILE",
    "SSL_CERT_DIR",
)


def bare_environment(given: Sequence[str] = ()) -> dict[str, str]:
    """This process's variables that are `KEPT` or `given`: none of the run's tokens, nor of its
    Python's packages. PATH is `search_path`."""
    found = {name: os.environ[name] for name in (*KEPT, *given) if name in os.environ}
    return found | {"PATH": search_path()}


def search_path() -> str:
    """PATH, and behind it the folder of this process's Python, since Debian has no `python` unless
    a virtual environment is activated."""
    return os.pathsep.join([os.environ.get("PATH", os.defpath), os.path.dirname(sys.executable)])


def _prctl(option: int, value: int) -> None:
    if LIBC.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value}) failed")


def run_to_its_end(coroutine: Coroutine[Any, Any, Result]) -> Result:
    """Run `coroutine` as `asyncio.run` does, also where a task that others' code has started raises
    `SystemExit`: the loop stops there, and would drop all of its tasks. Who awaits that task gets
    the `SystemExit` and says what becomes of it."""
    with asyncio.Runner() as runner:
        task = runner.get_loop().create_task(coroutine)
        while not task.done():
            with suppress(SystemExit):
                runner.get_loop().run_until_complete(task)
        return task.result()


def die_with_parent(parent: int | None = None) -> None:
    """This process gets SIGKILL when the thread that made it ends. `parent`: the pid that must
    still be the parent, for a process that was just forked (the parent may have ended before this
    call)."""
    expected = os.getppid() if parent is None else parent
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != expected:
        os.kill(os.getpid(), signal.SIGKILL)


def adopt_orphans() -> None:
    """Descendants whose parent ends become children of this process, so that it can find and end
    them."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def cores() -> int:
    """Those that this process may keep busy: as Slurm or taskset bound it, and no more than the
    least CPU quota of its control groups (a container's --cpus) pays for, which is rounded down."""
    return max(1, int(min(len(os.sched_getaffinity(0)), *_quotas(), math.inf)))


def _quotas() -> Iterator[float]:
    """Cores that this process's control groups, v1 and v2, and those above them may use. In a
    container its group may be the root of what is mounted, under another path than its own."""
    try:
        lines = OWN_GROUPS.read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number != "0" and "cpu" not in controllers.split(","):
            continue
        home = CGROUP if number == "0" else CGROUP / "cpu"
        group = home / path.strip("/")
        while group != home.parent:
            yield _quota(group, second=number == "0")
            group = group.parent


def _quota(group: Path, second: bool) -> float:
    """Infinite for a group without a limit, as the root."""
    try:
        if second:
            quota, period = (group / "cpu.max").read_text(encoding="utf-8").split()
        else:
            quota = (group / "cpu.cfs_quota_us").read_text(encoding="utf-8")
            period = (group / "cpu.cfs_period_us").read_text(encoding="utf-8")
        return int(quota) / int(period) if int(quota) > 0 else math.inf
    except (OSError, ValueError, ZeroDivisionError):  # ValueError: "max"
        return math.inf


def usable_threads() -> int:
    """Threads for work on the side (encoding, staging) where no key says how many: `cores`, and 8
    at most. More would fight over Python's lock with what the process is for, and each of them
    holds blocks in memory."""
    return min(MOST_THREADS, cores())


@contextmanager
def importing(*unused: str) -> Iterator[None]:
    """What is imported within is as old as the process: Python's collector looks for no garbage
    among these million objects, now (a fifth of the time that vLLM and DeepSpeed take) or later.
    Packages named in `unused` are not imported, though something within would if it found them."""
    hidden = [name for name in unused if sys.modules.setdefault(name, None) is None]
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
        for name in hidden:
            del sys.modules[name]
