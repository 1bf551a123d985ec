"""Measure a device's memory, and return a process's CPU memory to the system.

`device_memory` measures a torch device: the GPU's memory, or on a CPU the machine's. `host_bytes`
is the most host memory that this process's control groups allow.

`release_pages` returns memory that other code allocated, such as a model's parameters: after
`madvise(MADV_DONTNEED)` a page is free at once, and the next touch maps a zeroed one.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

GIB = 2**30
PAGE = mmap.PAGESIZE
CGROUP = Path("/sys/fs/cgroup")
PROCESS = Path("/proc/self/cgroup")
_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def release_pages(spans: Iterable[tuple[int, int]]) -> int:
    """Return to the system all pages that are completely inside `spans`, (address, bytes). The
    pages read as zeros afterwards. Spans in shared memory or in a mapped file are left alone,
    because their pages would read as the file's content. Returns the number of bytes released.
    Raises `OSError` when madvise fails."""
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
    """Return the address ranges [start, end) of this process's private memory that no file backs,
    ascending. Neighbouring mappings are joined."""
    joined: list[tuple[int, int]] = []
    for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
        span, rights, _, _, inode = line.split(maxsplit=5)[:5]
        if rights[3] == "p" and inode == "0":
            low, high = (int(end, 16) for end in span.split("-"))
            if joined and joined[-1][1] == low:
                low = joined.pop()[0]
            joined.append((low, high))
    return joined


class DeviceMemory(NamedTuple):
    """A measurement of a device's memory, in GiB."""

    free: float
    total: float
    # This process's memory; None on a GPU, for which CUDA reports no figure per process.
    own: float | None

    def freed_since(self, before: DeviceMemory) -> float:
        """GiB that this process released since `before`; negative if it allocated more. On a GPU
        this includes what other processes released or allocated."""
        return self.free - before.free if self.own is None else before.own - self.own


def device_memory(device) -> DeviceMemory:
    """Measure the memory of a torch device: the GPU's, or on a CPU the machine's."""
    if device.type == "cuda":
        import torch

        free, total = torch.cuda.mem_get_info(device)
        return DeviceMemory(free / GIB, total / GIB, None)
    machine = _kib(Path("/proc/meminfo"))
    own = _kib(Path("/proc/self/smaps_rollup"))["Rss"]
    return DeviceMemory(machine["MemAvailable"] / 2**20, machine["MemTotal"] / 2**20, own / 2**20)


def host_bytes() -> float:
    """Bytes of memory that this process and its children may use together: the machine's memory,
    or the smallest limit of this process's control groups."""
    machine = os.sysconf("SC_PHYS_PAGES") * PAGE
    return min([machine, *(_limit(group / name) for group, name, _ in control_groups())])


def control_groups() -> Iterator[tuple[Path, str, str]]:
    """Yield (folder, name of its limit file, name of its usage file) of each memory control group
    of this process, from its own up to the root. Covers cgroup v1 and v2."""
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
    """Read the limit in bytes from a control group's file; infinite if the file has no number."""
    try:
        return int(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return math.inf  # "max", or no such file, as in the root group


def _kib(path: Path) -> dict[str, int]:
    """Return the lines `name: n kB` of a /proc file as {name: n}."""
    found = (line.split() for line in path.read_text(encoding="utf-8").splitlines())
    return {words[0].rstrip(":"): int(words[1]) for words in found if words[-1] == "kB"}
