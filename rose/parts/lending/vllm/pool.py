"""The part of its KV cache that an engine may use. All other blocks are withheld from vLLM's pool,
and their memory is released.

There are two measures. *Bytes of blocks* is the memory that requests can use. *Bytes of pages* is
the device memory behind it, as the workers report it; both engines of a device share this memory.
Neither includes vLLM's null block, which every engine always holds.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rose.parts.lending.vllm.blocks import Layout
from rose.parts.lending.vllm.compact import Pages
from rose.parts.lending.vllm.free_queue import LowFirst

# Names of the workers' methods (rose/parts/lending/vllm/kv_worker.py).
RELEASE = "rose_release_blocks"
MAP = "rose_map_blocks"
RETRY_S = 1.0  # seconds after a failure to map before memory is requested again
# Most bytes that one call maps, so that a large request succeeds in part if memory is short. Also
# the most bytes that are mapped or released while a step is planned; this takes 7 ms on a GPU.
AT_ONCE = 2**28
# The same limit while a step is in flight. It takes about 1 ms on a GPU, for which requests wait.
IN_FLIGHT = 2**25
# A request of at most this many blocks that fails is not split further.
FEW = 16
# Calls of `limit` between two checks for free pages; a check of 50,000 blocks takes a few ms.
SETTLE = 32

# Calls a method, with block ids, in every worker; returns the bytes that each worker reports.
Call = Callable[[str, list[int]], Sequence[int]]


class Pool:
    """Withholds blocks from vLLM's block pool and lends them to it. `manager` is vLLM's
    KVCacheManager, `kv_cache_config` its configuration. Only free blocks can be withheld, not those
    that requests hold. Call it in the thread of vLLM's loop while it plans a step."""

    def __init__(self, manager: Any, kv_cache_config: Any) -> None:
        self._manager, self._blocks = manager, manager.block_pool
        tensors, blocks = kv_cache_config.kv_cache_tensors, kv_cache_config.num_blocks
        self.block_bytes = max(tensor.size for tensor in tensors) // blocks
        self.count = blocks - 1  # number of blocks without vLLM's null block
        self._usable = np.zeros(blocks, bool)  # blocks that are not withheld
        self._usable[0] = True  # vLLM's null block
        self._blocks.touch(self._blocks.blocks[1:])
        self._queue = self._blocks.free_block_queue = LowFirst(blocks)
        self.mapped = 0  # bytes of pages
        self._asked: tuple[int, float] | None = None  # (blocks, bytes of pages) of the last `limit`
        # True if the usable blocks take more pages than as many blocks at the low end would.
        self.scattered = False
        self._calls = 0  # calls of `limit` while `scattered`
        self._failed_at = 0.0  # time of the last failure to map; 0 after a success

    def begin(self, call: Call, layout: Layout | None = None, page: int = 0) -> None:
        """Begin to manage memory when workers can be called; until then no block may be used.
        `layout` and `page`: of the workers' KV caches. Without them, blocks share no pages."""
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
        """Bytes of the blocks that the engine may use now."""
        return (int(self._usable.sum()) - 1) * self.block_bytes

    @property
    def overhead(self) -> int:
        """Bytes of pages beyond those of the usable blocks: the unused parts of pages."""
        return max(0, self.mapped - self.limit_bytes)

    @property
    def free(self) -> int:
        """Bytes of usable blocks that no request holds; they may have cached prefixes."""
        return self._blocks.get_num_free_blocks() * self.block_bytes

    @property
    def used(self) -> int:
        return self.limit_bytes - self.free

    @property
    def can_map(self) -> bool:
        """True if blocks are withheld, and mapping has not failed within `RETRY_S`."""
        return not self._usable.all() and (
            not self._failed_at or time.monotonic() - self._failed_at > RETRY_S
        )

    def excess(self, nbytes: float, requests: Sequence[str]) -> int:
        """Return how many of `requests`, from the first on, must end so that the other requests'
        blocks fit into `nbytes` of pages. Returns all of them if even that isn't enough."""
        held = self._held()
        if self._pages.nbytes(held) <= nbytes:
            return 0
        ids = [np.array(self._manager.get_block_ids(name)[0], np.int64) for name in requests]
        others = held.copy()
        for of_one in ids:
            others[of_one] = False
        others[0] = True

        def fits(number: int) -> bool:
            kept = others.copy()
            for of_one in ids[number:]:
                kept[of_one] = True
            return self._pages.nbytes(kept) <= nbytes

        low, high = 0, len(ids)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if fits(middle) else (middle, high)
        return high

    def paced(self, nbytes: float, soon: float, piece: float) -> float:
        """Return the bytes of blocks to request from `limit` in this step, on the way up to
        `nbytes`. `soon` bytes are needed now; at most `piece` bytes are added beyond them."""
        if nbytes <= self.limit_bytes:
            return nbytes
        return min(nbytes, max(self.limit_bytes, soon) + piece)

    def limit(self, nbytes: float, most: float = math.inf, at_once: float = math.inf) -> int:
        """Use at most `nbytes` of blocks from now on, in at most `most` bytes of pages. Return the
        bytes of pages mapped now. Blocks that requests hold stay. While the mapped pages fit into
        `most`, each call withholds at most `at_once` bytes of blocks, so that several calls share
        the work. If memory is short, no error is raised, and blocks stay withheld."""
        asked = (max(0, min(self.count, int(min(nbytes, self.total) // self.block_bytes))), most)
        now = int(self._usable.sum()) - 1
        if asked[0] < now or self.mapped > most or self._may_settle():
            self._become(
                self._without_oldest(*asked)
                if self._pages.alone
                else self._pages.choose(self._held(), *asked),
                asked,
                at_once if self.mapped <= most else math.inf,
            )
            self.scattered = (
                not self._pages.alone and self._pages.nbytes(self._usable) > self._ideal()
            )
        elif asked[0] > now and (asked != self._asked or self._failed_at and self.can_map):
            self._become(self._pages.choose(self._usable, *asked), asked, at_once)
        self._asked = asked
        return self.mapped

    def _without_oldest(self, wanted: int, most: float) -> np.ndarray:
        """Choose the usable blocks of a cache in which blocks share no page. Drops free blocks:
        first those without a cached prefix, then those with the least recently used prefixes."""
        beyond = math.ceil((self.mapped - min(most, self.mapped)) / self.block_bytes)
        over = max(int(self._usable.sum()) - 1 - wanted, beyond, 0)
        usable = self._usable.copy()
        usable[
            [block.block_id for block in self._blocks.free_block_queue.get_all_free_blocks()[:over]]
        ] = False
        return usable

    def _may_settle(self) -> bool:
        """True if `limit` should check for pages that have become free. In a scattered pool it
        checks at every SETTLE-th call, and when no request holds blocks."""
        if not self.scattered:
            return False
        self._calls += 1
        idle = self._blocks.get_num_free_blocks() == int(self._usable.sum()) - 1
        return self._calls % SETTLE == 0 or idle

    def _ideal(self) -> int:
        """Bytes of pages that the same number of blocks would take at the low end."""
        low = np.arange(self._usable.size) < int(self._usable.sum())
        return self._pages.nbytes(low)

    def _held(self) -> np.ndarray:
        """The blocks that requests hold, and vLLM's null block, (blocks,) bool."""
        held = self._usable & ~self._queue.free
        held[0] = True
        return held

    def _become(self, usable: np.ndarray, asked: tuple[int, float], at_once: float) -> None:
        """Make exactly the blocks `usable` usable: withhold the others, then lend the new blocks.
        If `at_once` delays some of the withholding, lend only as many blocks as `asked` lacks."""
        gone = np.flatnonzero(self._usable & ~usable)
        some = gone[-max(1, int(min(at_once, self.total) // self.block_bytes)) :]
        self._withhold(some)
        if some.size < gone.size:
            usable = self._pages.choose(self._usable, *asked)
        self._lend(np.flatnonzero(~self._usable & usable))

    def _withhold(self, ids: np.ndarray) -> None:
        """Take these free blocks out of vLLM's pool, and release their memory."""
        if not ids.size:
            return
        self._blocks.evict_blocks(set(ids.tolist()))
        self._blocks.touch([self._blocks.blocks[block] for block in ids])
        self._usable[ids] = False
        self.mapped -= min(self._call(RELEASE, ids.tolist()))

    def _lend(self, ids: np.ndarray) -> None:
        """Lend these blocks to vLLM, the lowest first, as far as there is memory."""
        if not ids.size:
            return
        some = max(1, AT_ONCE // self.block_bytes)
        self._failed_at, at = 0.0, 0
        while at < ids.size:
            part = ids[at : at + some].tolist()
            if self._map_on_all(part):
                at += len(part)
            elif len(part) > FEW:
                some = len(part) // 4
            else:
                break
        self._usable[ids[:at]] = True
        self._blocks.free_blocks([self._blocks.blocks[block] for block in ids[:at]])

    def _map_on_all(self, ids: list[int]) -> bool:
        """Map these blocks on all workers, or on none. Return True if that succeeded."""
        reports = self._call(MAP, ids)
        if min(reports) < 0:
            self._call(RELEASE, ids)
            self._failed_at = time.monotonic()
            return False
        self.mapped += max(reports)
        return True
