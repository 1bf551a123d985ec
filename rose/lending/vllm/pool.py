"""How much of its KV cache an engine may use: the rest of vLLM's blocks are taken out of its pool,
and the memory behind them is given back to the system.

Two measures: of blocks, what requests can use; of pages, what it costs. The second is what both
engines of a device share, and counts what the workers report as mapped and given back. The pages of
vLLM's null block are in neither: every engine has them from its start to its end.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rose.engine.blocks import Layout
from rose.lending.vllm.compact import Pages
from rose.lending.vllm.free_queue import LowFirst

RELEASE, MAP = "rose_release_blocks", "rose_map_blocks"  # of the workers
AGAIN_S = 1.0  # before memory is asked for that the device has just not had
# Bytes that one call maps, so that of a large wish the first part is there when the rest isn't; and
# that change hands while a step is planned: about 10 ms on a GPU, during which no request goes on.
AT_ONCE = 2**28
FEW = 16  # blocks that aren't asked for one by one
# steps between two looks whether pages have become free, each a few ms for 50,000 blocks
SETTLE = 32

# a method of every worker, with block ids -> bytes that each reports
Call = Callable[[str, list[int]], Sequence[int]]


class Pool:
    """`manager`: vLLM's KVCacheManager; `kv_cache_config`: what it manages. Blocks that requests
    hold can't be taken: `limit` takes what is free, and returns how far it got. For the thread of
    vLLM's loop, while it plans a step: see `vmm.PagePool`."""

    def __init__(self, manager: Any, kv_cache_config: Any) -> None:
        self._manager, self._blocks = manager, manager.block_pool
        tensors, blocks = kv_cache_config.kv_cache_tensors, kv_cache_config.num_blocks
        self.block_bytes = max(tensor.size for tensor in tensors) // blocks
        self.count = blocks - 1  # vLLM keeps one for nothing
        self._usable = np.zeros(blocks, bool)  # the others are withheld from vLLM
        self._usable[0] = True  # vLLM's own
        self._blocks.touch(self._blocks.blocks[1:])
        self._blocks.free_block_queue = LowFirst()
        self.mapped = 0  # bytes
        self._asked: tuple[int, float] | None = None  # of the last `limit`: blocks, bytes
        self.strewn = False  # requests keep pages of which most is free
        self._calls = 0  # of `limit` while it is so
        self._failed_at = 0.0  # when the device had no memory; 0: it had

    def begin(self, call: Call, layout: Layout | None = None, page: int = 0) -> None:
        """The workers can be reached: from here on there is `limit`, and until then nothing may be
        used. `layout`, `page`: of their KV caches; without them blocks share no pages."""
        self._call = call
        if layout is None:
            layout = Layout(self.total, self.count + 1, (0,), (self.block_bytes,))
            page = self.block_bytes
        self._pages = Pages(layout, page)
        self.grain = self._pages.grain  # bytes of pages that one more block may take

    @property
    def total(self) -> int:
        """Bytes of all blocks."""
        return self.count * self.block_bytes

    @property
    def limit_bytes(self) -> int:
        """Of the blocks that the engine may use now."""
        return (int(self._usable.sum()) - 1) * self.block_bytes

    @property
    def overhead(self) -> int:
        """Bytes of pages beyond those of the blocks in use: of pages that are kept for a part."""
        return max(0, self.mapped - self.limit_bytes)

    @property
    def free(self) -> int:
        """Bytes that it may use and no request holds; prefixes cached there may be dropped."""
        return self._blocks.get_num_free_blocks() * self.block_bytes

    @property
    def used(self) -> int:
        return self.limit_bytes - self.free

    @property
    def can_map(self) -> bool:
        """Whether to ask for more: blocks are withheld, and the device has not just refused."""
        return not self._usable.all() and (
            not self._failed_at or time.monotonic() - self._failed_at > AGAIN_S
        )

    def excess(self, nbytes: float, requests: Sequence[str]) -> int:
        """How many of these requests, the first ones first, must end so that what the others hold
        fits into `nbytes` of pages; all of them where that isn't enough."""
        counts = self._counts()
        if self._pages.nbytes(counts > 0) <= nbytes:
            return 0
        ids = [np.array(self._manager.get_block_ids(name)[0], np.int64) for name in requests]

        def fits(number: int) -> bool:
            ended = np.bincount(np.concatenate(ids[:number]), minlength=counts.size)
            return self._pages.nbytes(counts - ended > 0) <= nbytes

        low, high = 0, len(ids)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if fits(middle) else (middle, high)
        return high

    def paced(self, nbytes: float, soon: float = 0.0) -> float:
        """What to ask of `limit` in this step, on the way up to `nbytes` of blocks of which `soon`
        must be there."""
        if nbytes <= self.limit_bytes:
            return nbytes
        return min(nbytes, max(self.limit_bytes, soon) + AT_ONCE)

    def limit(self, nbytes: float, most: float = math.inf, at_once: float = math.inf) -> int:
        """Use blocks of at most `nbytes` from now on, and as far as that fits into `most` bytes of
        pages. What requests hold stays. Of blocks that go, at most `at_once` bytes go in this call
        while there is room for all within `most`; the others at later ones. Returns the bytes of
        pages that this engine has now.

        Raises nothing for want of memory: those blocks stay withheld.
        """
        asked = (max(0, min(self.count, int(min(nbytes, self.total) // self.block_bytes))), most)
        now = int(self._usable.sum()) - 1
        if asked[0] < now or self.mapped > most or self._may_settle():
            self._become(
                self._without_oldest(*asked)
                if self._pages.alone
                else self._pages.choose(self._usable & (self._counts() > 0), *asked),
                asked,
                at_once if self.mapped <= most else math.inf,
            )
            self.strewn = not self._pages.alone and self._pages.nbytes(self._usable) > self._ideal()
        elif asked[0] > now and (asked != self._asked or self._failed_at and self.can_map):
            self._become(self._pages.choose(self._usable, *asked), asked, at_once)
        self._asked = asked
        return self.mapped

    def _without_oldest(self, wanted: int, most: float) -> np.ndarray:
        """Where no page is shared, those blocks go whose cached prefixes are oldest."""
        beyond = math.ceil((self.mapped - min(most, self.mapped)) / self.block_bytes)
        over = max(int(self._usable.sum()) - 1 - wanted, beyond, 0)
        usable = self._usable.copy()
        usable[
            [block.block_id for block in self._blocks.free_block_queue.get_all_free_blocks()[:over]]
        ] = False
        return usable

    def _may_settle(self) -> bool:
        """Whether to look once more for pages that have become free, in a pool where they aren't
        full."""
        if not self.strewn:
            return False
        self._calls += 1
        idle = self._blocks.get_num_free_blocks() == int(self._usable.sum()) - 1
        return self._calls % SETTLE == 0 or idle

    def _ideal(self) -> int:
        """Bytes of pages that so many blocks take at the low end."""
        low = np.arange(self._usable.size) < int(self._usable.sum())
        return self._pages.nbytes(low)

    def _counts(self) -> np.ndarray:
        """Of each block, how many requests hold it; 0 for those withheld."""
        blocks = self._blocks.blocks
        counts = np.fromiter((block.ref_cnt for block in blocks), np.int64, len(blocks))
        counts[~self._usable] = 0
        counts[0] = 1
        return counts

    def _become(self, usable: np.ndarray, asked: tuple[int, float], at_once: float) -> None:
        """Memory goes back before any is asked for; where not all of it goes yet, only what is
        lacking is asked for."""
        gone = np.flatnonzero(self._usable & ~usable)
        some = gone[-max(1, int(min(at_once, self.total) // self.block_bytes)) :]
        self._withhold(some)
        if some.size < gone.size:
            usable = self._pages.choose(self._usable, *asked)
        self._lend(np.flatnonzero(~self._usable & usable))

    def _withhold(self, ids: np.ndarray) -> None:
        if not ids.size:
            return
        self._blocks.evict_blocks(set(ids.tolist()))
        self._blocks.touch([self._blocks.blocks[block] for block in ids])
        self._usable[ids] = False
        self.mapped -= min(self._call(RELEASE, ids.tolist()))

    def _lend(self, ids: np.ndarray) -> None:
        """Give these blocks to vLLM, the lower ones first, as far as there is memory."""
        if not ids.size:
            return
        some = max(1, AT_ONCE // self.block_bytes)
        self._failed_at, at = 0.0, 0
        while at < ids.size:
            part = ids[at : at + some].tolist()
            if self._has_memory(part):
                at += len(part)
            elif len(part) > FEW:
                some = len(part) // 4
            else:
                break
        self._usable[ids[:at]] = True
        self._blocks.free_blocks([self._blocks.blocks[block] for block in ids[:at]])

    def _has_memory(self, ids: list[int]) -> bool:
        """Whether these blocks have it now: on all workers, or else on none."""
        reports = self._call(MAP, ids)
        if min(reports) < 0:
            self._call(RELEASE, ids)
            self._failed_at = time.monotonic()
            return False
        self.mapped += max(reports)
        return True
