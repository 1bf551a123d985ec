"""The order in which vLLM's block pool hands out free blocks, with used blocks at the low end.

vLLM hands out blocks without a cached prefix first, the last freed one first, wherever it lies.
This queue hands them out by block number. Blocks with a cached prefix come after these, least
recently used first, as in vLLM. Importing this module imports vLLM.
"""

from __future__ import annotations

import heapq

from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue, KVCacheBlock


class LowFirst(FreeKVCacheBlockQueue):
    """An empty replacement of `BlockPool.free_block_queue`, which hands out blocks without a cached
    prefix by their number, the lowest first."""

    def __init__(self) -> None:
        super().__init__([])
        self._uncached: dict[int, KVCacheBlock] = {}  # free blocks without a cached prefix
        self._heap: list[int] = []  # block numbers of these, and some that were handed out since

    def prepend_n(self, blocks: list[KVCacheBlock]) -> None:
        """Add free blocks; vLLM calls it for blocks without a cached prefix."""
        for block in blocks:
            self._uncached[block.block_id] = block
            heapq.heappush(self._heap, block.block_id)
        self.num_free_blocks += len(blocks)

    def popleft(self) -> KVCacheBlock:
        return self.popleft_n(1)[0] if self.num_free_blocks else super().popleft()

    def popleft_n(self, n: int) -> list[KVCacheBlock]:
        assert self.num_free_blocks >= n
        taken = []
        while self._uncached and len(taken) < n:
            block = self._uncached.pop(heapq.heappop(self._heap), None)
            if block is not None:
                taken.append(block)
        self.num_free_blocks -= len(taken)
        return taken + super().popleft_n(n - len(taken))

    def remove(self, block: KVCacheBlock) -> None:
        if self._uncached.pop(block.block_id, None) is None:
            super().remove(block)
        else:
            self.num_free_blocks -= 1

    def get_all_free_blocks(self) -> list[KVCacheBlock]:
        uncached = [self._uncached[number] for number in sorted(self._uncached)]
        return uncached + super().get_all_free_blocks()
