"""Child processes that end with their parent (Linux's parent-death signal and child subreaper),
names of processes, numbers of cores and threads, and faster imports of large packages.

Imports nothing of ROSE. Needs Linux, as ROSE's engines and MPI settings do.
"""

from __future__ import annotations

import asyncio
import ctypes
import functools
import gc
import hashlib
import math
import os
import platform
import signal
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

Result = TypeVar("Result")

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
MOST_THREADS = 8  # upper bound of numbers of threads that no key sets
CGROUP = Path("/sys/fs/cgroup")
OWN_GROUPS = Path("/proc/self/cgroup")
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
LIBC = ctypes.CDLL(None, use_errno=True)  # loaded here, as a forked child must not load it

# Variables that the programs of agents and environments may see; the others could leak secrets.
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


async def in_daemon(function: Callable[[], Result]) -> Result:
    """Call a function that may hang, as on a dead mount, in a thread; return its result. Unlike
    threads of `asyncio.to_thread`, this thread lets the event loop and the process end."""
    loop = asyncio.get_running_loop()
    result: asyncio.Future[Result] = loop.create_future()

    def settle(how: Callable[[Any], None], what: Any) -> None:
        if not result.done():
            how(what)

    def call() -> None:
        try:
            found = result.set_result, function()
        except Exception as error:
            found = result.set_exception, error
        with suppress(RuntimeError):  # The loop may have been closed meanwhile.
            loop.call_soon_threadsafe(settle, *found)

    threading.Thread(target=call, name="may-hang", daemon=True).start()
    return await result


def signal_name(number: int) -> str:
    """Return a signal's name, such as SIGTERM; "signal 40" for a real-time signal."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def mark() -> str:
    """Return a name for this process that no other process has: the machine's boot, the PID
    namespace, the process's id and its start. Machines may share a folder for temporary files, and
    each container has its own process ids."""
    return f"{_here()}.{os.getpid()}.{_start(os.getpid())}"


def has_ended(marked: str) -> bool:
    """True if `marked` is the `mark` of a process that has ended, of this machine and PID
    namespace. False for processes elsewhere, which can't be seen from here, and for other texts."""
    here, _, rest = marked.partition(".")
    pid, _, start = rest.partition(".")
    return here == _here() and pid.isdecimal() and _start(int(pid)) != start


def boot() -> str:
    """Return the id of this machine's boot, or the machine's name in containers that hide it."""
    try:
        return BOOT_ID.read_text(encoding="utf-8").strip()
    except OSError:
        return platform.node()


@functools.cache
def _here() -> str:
    """Return the part of a mark that names this machine's boot and the PID namespace."""
    namespace = os.stat("/proc/self/ns/pid").st_ino
    return hashlib.blake2s(f"{boot()} {namespace}".encode(), digest_size=4).hexdigest()


def _start(pid: int) -> str:
    """Return when a process began, in clock ticks after boot; "" if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19]
    except OSError:
        return ""


def bare_environment(given: Sequence[str] = ()) -> dict[str, str]:
    """Return this process's variables whose names are in `KEPT` or `given`, with PATH from
    `search_path`. The run's tokens and the paths of its Python packages are left out."""
    found = {name: os.environ[name] for name in (*KEPT, *given) if name in os.environ}
    return found | {"PATH": search_path()}


def search_path() -> str:
    """Return PATH followed by the folder of this process's Python, because Debian has a command
    `python` only in an activated virtual environment."""
    return os.pathsep.join([os.environ.get("PATH", os.defpath), os.path.dirname(sys.executable)])


def _prctl(option: int, value: int) -> None:
    if LIBC.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value}) failed")


def run_to_its_end(coroutine: Coroutine[Any, Any, Result]) -> Result:
    """Run `coroutine` as `asyncio.run` does, even if a task of a user's code raises `SystemExit`.
    `SystemExit` in a task stops the event loop; this restarts the loop. The code that awaits the
    task also gets the `SystemExit` and handles it."""
    with asyncio.Runner() as runner:
        task = runner.get_loop().create_task(coroutine)
        while not task.done():
            with suppress(SystemExit):
                runner.get_loop().run_until_complete(task)
        return task.result()


def die_with_parent(parent: int | None = None) -> None:
    """Have the kernel kill this process (SIGKILL) when the thread that started it ends. With
    `parent`, the pid of its parent at the start, also kill it now if that parent has ended already.
    Without it, an end before this call isn't noticed."""
    expected = os.getppid() if parent is None else parent
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != expected:
        os.kill(os.getpid(), signal.SIGKILL)


def adopt_orphans() -> None:
    """Make orphaned descendants children of this process, so that it can find and end them."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def cores() -> int:
    """Return the number of cores that this process may use, at least 1: the cores of its CPU
    affinity, limited by the CPU quotas of its control groups (a container's --cpus), rounded down.
    """
    return max(1, int(min(len(os.sched_getaffinity(0)), *_quotas(), math.inf)))


def _quotas() -> Iterator[float]:
    """Yield the quotas, in cores, of this process's control groups (v1 and v2) and of all groups
    above them. The path of a group may be missing in a container, which may mount it as the root;
    its ancestors up to the root are read as well."""
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
            yield _quota(group, version_2=number == "0")
            group = group.parent


def _quota(group: Path, version_2: bool) -> float:
    """Return a control group's CPU quota in cores; infinite if it has none, like the root group."""
    try:
        if version_2:
            quota, period = (group / "cpu.max").read_text(encoding="utf-8").split()
        else:
            quota = (group / "cpu.cfs_quota_us").read_text(encoding="utf-8")
            period = (group / "cpu.cfs_period_us").read_text(encoding="utf-8")
        return int(quota) / int(period) if int(quota) > 0 else math.inf
    except (OSError, ValueError, ZeroDivisionError):  # ValueError: "max"
        return math.inf


def usable_threads() -> int:
    """Return the number of threads for encoding and staging weights if no key sets it: `cores`, at
    most 8. More would compete with the main thread for Python's lock, and each needs memory."""
    return min(MOST_THREADS, cores())


@contextmanager
def importing(*unused: str) -> Iterator[None]:
    """Import large packages faster: objects created within the block are exempt from garbage
    collection, which would take a fifth of the import time of vLLM and DeepSpeed, and more later.
    Within the block, imports of the packages in `unused` fail. Packages to which they are optional
    do without them."""
    hidden = [name for name in unused if sys.modules.setdefault(name, None) is None]
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
        for name in hidden:
            del sys.modules[name]
