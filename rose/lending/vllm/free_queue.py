"""The order in which vLLM's block pool hands out free blocks, so that what is used stays at the
pool's low end.

vLLM takes a block without a cached prefix where it was freed last, wherever that is; and the blocks
whose prefixes are cached after these, least recently used first, which stays as it is. Importing
this imports vLLM.
"""

from __future__ import annotations

import heapq

from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue, KVCacheBlock


class LowFirst(FreeKVCacheBlockQueue):
    """Takes the place of a `BlockPool.free_block_queue`, empty. Blocks without a cached prefix go
    out by their number, the lowest first."""

    def __init__(self) -> None:
        super().__init__([])
        self._loose: dict[int, KVCacheBlock] = {}  # without a prefix
        self._order: list[int] = []  # a heap of their numbers, and of some that have gone

    def prepend_n(self, blocks: list[KVCacheBlock]) -> None:
        """vLLM's for blocks without a prefix."""
        for block in blocks:
            self._loose[block.block_id] = block
            heapq.heappush(self._order, block.block_id)
        self.num_free_blocks += len(blocks)

    def popleft(self) -> KVCacheBlock:
        return self.popleft_n(1)[0] if self.num_free_blocks else super().popleft()

    def popleft_n(self, n: int) -> list[KVCacheBlock]:
        assert self.num_free_blocks >= n
        taken = []
        while self._loose and len(taken) < n:
            block = self._loose.pop(heapq.heappop(self._order), None)
            if block is not None:
                taken.append(block)
        self.num_free_blocks -= len(taken)
        return taken + super().popleft_n(n - len(taken))

    def remove(self, block: KVCacheBlock) -> None:
        if self._loose.pop(block.block_id, None) is None:
            super().remove(block)
        else:
            self.num_free_blocks -= 1

    def get_all_free_blocks(self) -> list[KVCacheBlock]:
        loose = [self._loose[number] for number in sorted(self._loose)]
        return loose + super().get_all_free_blocks()
