"""The pool behind a KV cache on a CPU: private anonymous memory. `madvise(MADV_DONTNEED)` frees a
page at once, and the next touch maps a zeroed page.

The memory has no transparent huge pages. A huge page that is released in part stays whole until
memory is short, and khugepaged would fill released pages again (max_ptes_none is 511 by default).
"""

from __future__ import annotations

import mmap
from contextlib import AbstractContextManager, nullcontext

from rose.memory import PAGE
from rose.parts.lending.vllm.blocks import Ranges


class HostPages:
    """A `Pool` (blocks.py) of at least `nbytes` in host memory. A page is resident once touched."""

    page = PAGE

    def __init__(self, nbytes: int) -> None:
        self.nbytes = -(-nbytes // PAGE) * PAGE
        self._memory = mmap.mmap(-1, self.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._memory.madvise(mmap.MADV_NOHUGEPAGE)

    def map(self, ranges: Ranges) -> None:
        """Do nothing, because the system maps a page when it is first touched."""

    def release(self, ranges: Ranges) -> None:
        for low, high in ranges:
            self._memory.madvise(mmap.MADV_DONTNEED, low, high - low)

    def scratch(self) -> AbstractContextManager[None]:
        """Return an empty context, because every page may be touched at any time."""
        return nullcontext()

    def tensor(self):
        """Return the pool's memory as int8, (nbytes,). The memory lives as long as the tensor."""
        import torch

        return torch.frombuffer(self._memory, dtype=torch.int8)
