"""How much memory a process's device has, and memory of the CPU that really goes back to the
system.

`look` asks a torch device: the GPU's memory, or on a CPU the machine's. `host_bytes` is what its
control groups leave of that at most.

`HostPages` is the pool behind a KV cache: private anonymous memory, in which
`madvise(MADV_DONTNEED)` frees a page at once and the next touch brings a zeroed one. Transparent
huge pages are kept out: a huge page that is given back in part stays whole until memory is short,
and khugepaged would fill released pages in again (max_ptes_none is 511 by default). `give_back`
does the same for memory that others allocated, such as a model's parameters.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import NamedTuple

GIB = 2**30
PAGE = mmap.PAGESIZE
CGROUP, PROCESS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
Ranges = list[tuple[int, int]]  # [start, end) in bytes, ascending, neither touching nor overlapping
_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class HostPages:
    """A `blocks.Pool` of at least `nbytes`. Nothing is resident until it is touched."""

    page = PAGE

    def __init__(self, nbytes: int) -> None:
        self.nbytes = -(-nbytes // PAGE) * PAGE
        self._memory = mmap.mmap(-1, self.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._memory.madvise(mmap.MADV_NOHUGEPAGE)

    def map(self, ranges: Ranges) -> None:
        """The system does it at the first touch."""

    def release(self, ranges: Ranges) -> None:
        for low, high in ranges:
            self._memory.madvise(mmap.MADV_DONTNEED, low, high - low)

    def scratch(self) -> AbstractContextManager[None]:
        """Nothing: the system gives memory to whatever is touched."""
        return nullcontext()

    def tensor(self):
        """int8, (nbytes,): the pool's own memory, which lives as long as the tensor does."""
        import torch

        return torch.frombuffer(self._memory, dtype=torch.int8)


def give_back(spans: Iterable[tuple[int, int]]) -> int:
    """Drop the whole pages inside these (address, bytes) of this process; they read as zeros
    afterwards. Returns the bytes of those pages.

    Memory mapped from a file or shared is left alone: dropped, it would show the file again. Raises
    `OSError`.
    """
    mapped = _anonymous()
    starts = [low for low, _ in mapped]
    total = 0
    for address, nbytes in spans:
        low, high = -(-address // PAGE) * PAGE, (address + nbytes) // PAGE * PAGE
        found = bisect_right(starts, low) - 1
        if low >= high or found < 0 or mapped[found][1] < high:
            continue
        if _libc.madvise(low, high - low, mmap.MADV_DONTNEED):
            error = ctypes.get_errno()
            raise OSError(error, f"madvise of {high - low} bytes at {low:#x}")
        total += high - low
    return total


def _anonymous() -> list[tuple[int, int]]:
    """[start, end) of this process's private memory without a file, neighbours joined,
    ascending."""
    joined: list[tuple[int, int]] = []
    for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
        span, rights, _, _, inode = line.split(maxsplit=5)[:5]
        if rights[3] == "p" and inode == "0":
            low, high = (int(end, 16) for end in span.split("-"))
            if joined and joined[-1][1] == low:
                low = joined.pop()[0]
            joined.append((low, high))
    return joined


def resident_bytes(pid: int) -> int:
    """Memory of process `pid` that is in RAM now, shared pages included; exact, unlike
    /proc/PID/statm. Raises `OSError` when the process is gone or another user's."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="utf-8").splitlines():
        if line.startswith("Rss:"):
            return int(line.split()[1]) * 1024
    raise ProcessLookupError(f"process {pid} has ended")


class DeviceMemory(NamedTuple):
    """GiB."""

    free: float
    total: float
    own: float | None  # of this process; null on a GPU, where nobody tells

    def given_since(self, before: DeviceMemory) -> float:
        """GiB that this process gave back since `before`; negative if it took some. On a GPU what
        others gave or took meanwhile counts too."""
        return self.free - before.free if self.own is None else before.own - self.own


def look(device) -> DeviceMemory:
    """The memory of a torch device, now."""
    if device.type == "cuda":
        import torch

        free, total = torch.cuda.mem_get_info(device)
        return DeviceMemory(free / GIB, total / GIB, None)
    machine = _kib(Path("/proc/meminfo"))
    own = _kib(Path("/proc/self/smaps_rollup"))["Rss"]
    return DeviceMemory(machine["MemAvailable"] / 2**20, machine["MemTotal"] / 2**20, own / 2**20)


def host_bytes() -> float:
    """Memory that this process and those it starts may take in all: the machine's, or the least
    limit of its control groups."""
    machine = os.sysconf("SC_PHYS_PAGES") * PAGE
    return min([machine, *(_limit(group / name) for group, name, _ in control_groups())])


def control_groups() -> Iterator[tuple[Path, str, str]]:
    """(folder, names of the files of limit and usage) of this group and those above, v1 and v2."""
    for line in PROCESS.read_text(encoding="utf-8").splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0":
            home, names = CGROUP, ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            home, names = CGROUP / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        group = home / path.strip("/")
        while group != home.parent:
            yield (group, *names)
            group = group.parent


def _limit(path: Path) -> float:
    """Bytes; infinite without one."""
    try:
        return int(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return math.inf  # "max", or a group without limits, as the root


def _kib(path: Path) -> dict[str, int]:
    """The lines `name: n kB` of a file of /proc."""
    found = (line.split() for line in path.read_text(encoding="utf-8").splitlines())
    return {words[0].rstrip(":"): int(words[1]) for words in found if words[-1] == "kB"}
