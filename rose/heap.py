"""Settings of glibc's heap for engines and trainers on a CPU: keep freed memory, and populate pages
before an engine step needs them.

Activations of changing size are allocated between small long-lived objects. So the heap can grow
for as long as engine steps batch requests in new ways. A step in which the heap grows takes page
faults. They cost a quarter of its time and more on virtual machines, whose host must map the page
too. Allocators other than glibc's ignore these settings.

glibc also has environment variables (MALLOC_MMAP_THRESHOLD_, MALLOC_TRIM_THRESHOLD_,
MALLOC_TOP_PAD_), which also keep freed memory (CHANGELOG.md). They can't replace this module: glibc
reads them when a program starts, but a rank's engine is forked. No variable populates the heap
ahead of its use, and huge pages (glibc.malloc.hugetlb=1) would be zeroed within the engine step.
`Ahead` populates the heap while the engine has no request.
"""

from __future__ import annotations

import ctypes
import mmap
import time
from pathlib import Path

# Parameters of mallopt(3), from glibc's malloc.h.
M_TRIM_THRESHOLD = -1
M_TOP_PAD = -2
M_MMAP_THRESHOLD = -3
M_MMAP_MAX = -4
# Bytes, glibc's maximum. A larger allocation gets its own mapping, which is unmapped when freed.
MMAP_THRESHOLD = 32 << 20
TRIM_THRESHOLD = 1 << 30  # bytes free at the heap's end, beyond which glibc shrinks the heap
TRAINER_TOP_PAD = 64 << 20  # bytes added to each growth of a trainer's heap
ENGINE_TOP_PAD = 256 << 20  # bytes added to each growth of an engine's heap
# Bytes populated at once. This takes some milliseconds, in which the heap can't grow.
PIECE = 2 << 20
MADV_POPULATE_WRITE = 23  # madvise(2), Linux 5.14


def keep() -> None:
    """Let glibc keep freed memory. By default it may return large buffers to the system and
    request them again in the next engine step, depending on the heap's layout (CHANGELOG.md)."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, MMAP_THRESHOLD)
        mallopt(M_TRIM_THRESHOLD, TRIM_THRESHOLD)
        mallopt(M_TOP_PAD, ENGINE_TOP_PAD)


def keep_all() -> None:
    """Let glibc keep all freed memory until `release_free`, allocations above `MMAP_THRESHOLD` too.
    A trainer's gradients, DeepSpeed's copies of them and logits are that large. Mapping them again
    in each step would take as long as a small step's arithmetic (docs/benchmarks.md)."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_MAX, 0)
        mallopt(M_TRIM_THRESHOLD, -1)  # never
        mallopt(M_TOP_PAD, TRAINER_TOP_PAD)


def release_free() -> None:
    """Return the heap's free memory to the system, for other processes."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


class Ahead:
    """Populates this process's heap up to its end, including pages that no engine step has used.
    Does nothing if the process has no brk heap or the system lacks MADV_POPULATE_WRITE."""

    def __init__(self) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        self._sbrk, self._madvise = libc.sbrk, libc.madvise
        self._sbrk.restype, self._sbrk.argtypes = ctypes.c_void_p, (ctypes.c_ssize_t,)
        self._madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        self._populated_to = _heap_start()  # address; None: nothing can be populated

    def catch_up(self, seconds: float) -> bool:
        """Populate pieces until `seconds` have passed, at least one. Return True if nothing is left
        to populate, or if nothing can be populated."""
        end = (self._sbrk(0) or 0) // mmap.PAGESIZE * mmap.PAGESIZE
        until = time.monotonic() + seconds
        if self._populated_to is None:
            return True
        self._populated_to = min(self._populated_to, end)  # The heap may have shrunk.
        while self._populated_to < end:
            nbytes = min(PIECE, end - self._populated_to)
            if self._madvise(self._populated_to, nbytes, MADV_POPULATE_WRITE):
                self._populated_to = None  # refused by an older Linux, or for lack of memory
                return True
            self._populated_to += nbytes
            if time.monotonic() > until:
                break
        return self._populated_to == end


def _heap_start() -> int | None:
    """Return the address at which the brk heap begins; None if the process has none."""
    for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
        if line.endswith("[heap]"):
            return int(line.split("-", 1)[0], 16)
    return None
