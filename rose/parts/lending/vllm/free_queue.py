"""The order in which vLLM's block pool hands out free blocks: low numbers first, to use few pages.

vLLM first hands out blocks without a cached prefix, the most recently freed first. This queue hands
these out by block number, the lowest first. Blocks with a cached prefix come later, least recently
used first, as in vLLM. Importing this module imports vLLM.
"""

from __future__ import annotations

import heapq

import numpy as np
from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue, KVCacheBlock


class LowFirst(FreeKVCacheBlockQueue):
    """A replacement of vLLM's `BlockPool.free_block_queue`, at first empty. It hands out blocks
    without a cached prefix by number, the lowest first. `free`, (blocks,) bool: True for blocks
    that are in the queue."""

    def __init__(self, blocks: int) -> None:
        super().__init__([])
        self.free = np.zeros(blocks, bool)
        self._uncached: dict[int, KVCacheBlock] = {}  # free blocks without a cached prefix
        # Heap of the numbers of these blocks, and of some that were removed since.
        self._heap: list[int] = []
        self._queued: np.ndarray = np.zeros(blocks, bool)  # True for numbers in the heap

    def prepend_n(self, blocks: list[KVCacheBlock]) -> None:
        """Add free blocks. vLLM calls this for blocks without a cached prefix."""
        for block in blocks:
            self._uncached[block.block_id] = block
            if not self._queued[block.block_id]:
                self._queued[block.block_id] = True
                heapq.heappush(self._heap, block.block_id)
        self.num_free_blocks += len(blocks)
        self._mark(blocks, True)

    def append(self, block: KVCacheBlock) -> None:
        super().append(block)
        self.free[block.block_id] = True

    def append_n(self, blocks: list[KVCacheBlock]) -> None:
        super().append_n(blocks)
        self._mark(blocks, True)

    def popleft(self) -> KVCacheBlock:
        return self.popleft_n(1)[0] if self.num_free_blocks else super().popleft()

    def popleft_n(self, n: int) -> list[KVCacheBlock]:
        assert self.num_free_blocks >= n
        taken = []
        while self._uncached and len(taken) < n:
            number = heapq.heappop(self._heap)
            self._queued[number] = False
            block = self._uncached.pop(number, None)
            if block is not None:
                taken.append(block)
        self.num_free_blocks -= len(taken)
        taken += super().popleft_n(n - len(taken))
        self._mark(taken, False)
        return taken

    def remove(self, block: KVCacheBlock) -> None:
        self.free[block.block_id] = False
        if self._uncached.pop(block.block_id, None) is None:
            super().remove(block)
        else:
            self.num_free_blocks -= 1

    def get_all_free_blocks(self) -> list[KVCacheBlock]:
        uncached = [self._uncached[number] for number in sorted(self._uncached)]
        return uncached + super().get_all_free_blocks()

    def _mark(self, blocks: list[KVCacheBlock], free: bool) -> None:
        self.free[[block.block_id for block in blocks]] = free
