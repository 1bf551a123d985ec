"""Child processes that end with their parent (Linux's parent-death signal and child subreaper),
names of processes, numbers of cores and threads, and faster imports of large packages.

Imports nothing of ROSE. Left out: other systems than Linux; ROSE's engines and MPI settings need
Linux anyway.
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
MOST_THREADS = 8  # largest number of threads that is chosen where no key sets one
CGROUP = Path("/sys/fs/cgroup")
OWN_GROUPS = Path("/proc/self/cgroup")
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
LIBC = ctypes.CDLL(None, use_errno=True)  # loaded here, as a forked child must not load it

# Variables for programs that know nothing of the run. All others are removed.
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
    """Return what a function returns that may take for ever, as on a dead mount. Its thread keeps
    neither the event loop nor the process from ending, unlike those of `asyncio.to_thread`."""
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
        with suppress(RuntimeError):  # The loop has been closed meanwhile.
            loop.call_soon_threadsafe(settle, *found)

    threading.Thread(target=call, name="may-hang", daemon=True).start()
    return await result


def signal_name(number: int) -> str:
    """Return a signal's name, as SIGTERM; "signal 40" for a real-time signal."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def mark() -> str:
    """Return a name of this process for folders that other processes find: this machine's boot and
    PID namespace, and the process's id and start. Machines may share a folder for temporary files,
    and a container has process ids of its own."""
    return f"{_here()}.{os.getpid()}.{_start(os.getpid())}"


def has_ended(marked: str) -> bool:
    """True if `marked` is the mark of a process of this machine and PID namespace that has ended.
    False for other processes, which can't be seen from here, and for other texts."""
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
    namespace = os.stat("/proc/self/ns/pid").st_ino
    return hashlib.blake2s(f"{boot()} {namespace}".encode(), digest_size=4).hexdigest()


def _start(pid: int) -> str:
    """Return the clock ticks after boot at which a process began; "" if there is no such one."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19]
    except OSError:
        return ""


def bare_environment(given: Sequence[str] = ()) -> dict[str, str]:
    """Return this process's variables that are in `KEPT` or `given`, with PATH from `search_path`.
    Left out are the run's tokens and the paths of its Python packages."""
    found = {name: os.environ[name] for name in (*KEPT, *given) if name in os.environ}
    return found | {"PATH": search_path()}


def search_path() -> str:
    """Return PATH followed by the folder of this process's Python, since Debian has no `python`
    unless a virtual environment is activated."""
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
    """Let the kernel kill this process (SIGKILL) when the thread that started it ends. `parent`:
    the parent's pid, for a process that was just forked. If the parent ended before this call, the
    process kills itself."""
    expected = os.getppid() if parent is None else parent
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != expected:
        os.kill(os.getpid(), signal.SIGKILL)


def adopt_orphans() -> None:
    """Make orphaned descendants children of this process, so that it can find and end them."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def cores() -> int:
    """Return the number of cores that this process may use: those of its CPU affinity, and at most
    the least CPU quota of its control groups (a container's --cpus), rounded down; at least 1."""
    return max(1, int(min(len(os.sched_getaffinity(0)), *_quotas(), math.inf)))


def _quotas() -> Iterator[float]:
    """Yield the quota, in cores, of each of this process's control groups (v1 and v2) and of the
    groups above them. In a container the process's group may be mounted as the root, so that its
    own path doesn't exist there."""
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
    """Return a control group's CPU quota in cores; infinite where it has none, as the root."""
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
    """Return the threads for encoding and staging where no key sets them: `cores`, at most 8. More
    would compete with the main thread for Python's lock, and each holds blocks in memory."""
    return min(MOST_THREADS, cores())


@contextmanager
def importing(*unused: str) -> Iterator[None]:
    """Import large packages faster: exempt the objects created within from garbage collection.
    Collection among these million objects would take a fifth of the time in which vLLM and
    DeepSpeed import, and more later. Imports of the packages in `unused` fail within, so that
    packages for which they are optional do without."""
    hidden = [name for name in unused if sys.modules.setdefault(name, None) is None]
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
        for name in hidden:
            del sys.modules[name]
