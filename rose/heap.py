"""glibc's heap in an engine or a trainer on a CPU: what a step frees is kept, and in an engine more
is made resident early.

Activations of changing size come and go among small things that stay, so that the heap grows for as
long as an engine meets new compositions of steps. The step in which it does pays for it by page
fault: a quarter of its time and more on virtual machines, whose host has to find the page, too.
Other allocators don't listen to any of this.

glibc's variables (MALLOC_MMAP_THRESHOLD_, MALLOC_TRIM_THRESHOLD_, MALLOC_TOP_PAD_) keep as much in
a server that is started with them (CHANGELOG.md), but don't replace this: a rank's engine
is forked, and glibc reads them only where a program starts; and nothing in the environment makes a
heap resident that still grows. Huge pages (glibc.malloc.hugetlb=1) would be zeroed in the step.
`Ahead` populates the heap while no request is there.
"""

from __future__ import annotations

import ctypes
import mmap
import time
from pathlib import Path

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD, M_MMAP_MAX = -1, -2, -3, -4  # of mallopt(3)
# bytes: the most that glibc takes for M_MMAP_THRESHOLD; what is larger is mapped and unmapped
MAPPED = 32 << 20
KEPT = 1 << 30  # bytes free at the heap's end
PAD = 64 << 20  # bytes by which a trainer's heap grows at least
AHEAD = 256 << 20  # bytes by which the heap grows beyond what is asked for
PIECE = 2 << 20  # bytes, populated at once: some milliseconds at most, in which the heap can't grow
MADV_POPULATE_WRITE = 23  # Linux 5.14


def keep() -> None:
    """Let glibc keep what is freed. By default it gives large buffers back and gets them anew in
    the next step, or not, by how the heap happens to lie (CHANGELOG.md)."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, MAPPED)
        mallopt(M_TRIM_THRESHOLD, KEPT)
        mallopt(M_TOP_PAD, AHEAD)


def keep_all() -> None:
    """Let glibc keep whatever is freed, however large, until `malloc_trim`. A trainer's gradients,
    DeepSpeed's copies of them and logits are larger than what `keep` reaches: they were mapped anew
    in each step, which took as long as the step's arithmetic for few rows (docs/benchmarks.md)."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_MAX, 0)
        mallopt(M_TRIM_THRESHOLD, -1)  # never
        mallopt(M_TOP_PAD, PAD)


def give_back() -> None:
    """Return what is free in the heap to the system: others may need what this process won't."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


class Ahead:
    """Makes this process's heap resident up to its end, what no step has used yet included. Nothing
    happens where the system has no such heap, or can't do that."""

    def __init__(self) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        self._sbrk, self._madvise = libc.sbrk, libc.madvise
        self._sbrk.restype, self._sbrk.argtypes = ctypes.c_void_p, (ctypes.c_ssize_t,)
        self._madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        self._at = _begin()  # populated up to here

    def catch_up(self, seconds: float) -> bool:
        """Go on for so long at most, and a piece; whether all of it is resident now."""
        end = (self._sbrk(0) or 0) // mmap.PAGESIZE * mmap.PAGESIZE
        until = time.monotonic() + seconds
        if self._at is None:
            return True
        self._at = min(self._at, end)  # some may have been given back
        while self._at < end:
            nbytes = min(PIECE, end - self._at)
            if self._madvise(self._at, nbytes, MADV_POPULATE_WRITE):
                self._at = None  # an older Linux, or no memory left: pages come by fault, as ever
                return True
            self._at += nbytes
            if time.monotonic() > until:
                break
        return self._at == end


def _begin() -> int | None:
    """Where the heap begins, if there is one."""
    for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
        if line.endswith("[heap]"):
            return int(line.split("-", 1)[0], 16)
    return None
