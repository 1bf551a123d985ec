"""How much of its KV cache an engine may use: the rest of vLLM's blocks are taken out of its pool, and the memory
behind them is given back to the system."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

RELEASE, MAP = "rose_release_blocks", "rose_map_blocks"  # of the workers

Call = Callable[[str, list[int]], Any]  # a method of every worker with block ids


class Pool:
    """`manager`: vLLM's KVCacheManager; `kv_cache_config`: what it manages. Blocks that requests hold can't be taken:
    `limit` takes what is free, and says how far it came."""

    def __init__(self, manager: Any, kv_cache_config: Any) -> None:
        self._blocks = manager.block_pool
        tensors = kv_cache_config.kv_cache_tensors
        self.block_bytes = max(tensor.size for tensor in tensors) // kv_cache_config.num_blocks
        self.count = kv_cache_config.num_blocks - 1  # vLLM keeps one for nothing
        self._withheld: list[Any] = []
        self._call: Call | None = None
        self._adjacent = 1

    def begin(self, call: Call, adjacent: int = 1) -> None:
        """The workers can be reached: what this engine may use gets memory. `adjacent`: so many neighbouring blocks
        make whole pages; with more than one, memory is given back from one end of the pool."""
        self._call, self._adjacent = call, adjacent
        withheld = {block.block_id for block in self._withheld}
        self._call(MAP, [block for block in range(1, self.count + 1) if block not in withheld])

    @property
    def total(self) -> int:
        """Bytes of all blocks."""
        return self.count * self.block_bytes

    @property
    def limit_bytes(self) -> int:
        """What the engine may use now."""
        return (self.count - len(self._withheld)) * self.block_bytes

    @property
    def free(self) -> int:
        """Bytes that it may use and no request holds; prefixes cached there may be dropped."""
        return self._blocks.get_num_free_blocks() * self.block_bytes

    @property
    def used(self) -> int:
        return self.limit_bytes - self.free

    def excess(self, nbytes: float) -> int:
        """Blocks that requests hold beyond a limit of `nbytes`."""
        return max(0, self.count - len(self._withheld) - self._blocks.get_num_free_blocks() - self._fit(nbytes))

    def limit(self, nbytes: float) -> int:
        """Use at most `nbytes` from now on. Returns the limit reached: more than that where requests hold more."""
        take = self.count - self._fit(nbytes) - len(self._withheld)
        if take > 0 and (take := min(take, self._blocks.get_num_free_blocks())):
            taken = self._take(take)
            self._withheld += taken
            if self._call is not None:
                self._call(RELEASE, [block.block_id for block in taken])
        elif take < 0:
            back, self._withheld = self._withheld[take:], self._withheld[:take]
            if self._call is not None:
                self._call(MAP, [block.block_id for block in back])
            self._blocks.free_blocks(back)
        return self.limit_bytes

    def _take(self, count: int) -> list[Any]:
        """Free blocks: those whose cached prefixes are oldest, or, where single blocks give nothing back, the last."""
        if self._adjacent == 1:
            return self._blocks.get_new_blocks(count)
        free = [block for block in reversed(self._blocks.blocks) if block.ref_cnt == 0 and not block.is_null][:count]
        self._blocks.evict_blocks({block.block_id for block in free})
        self._blocks.touch(free)
        return free

    def _fit(self, nbytes: float) -> int:
        return max(0, min(self.count, int(nbytes // self.block_bytes)))
