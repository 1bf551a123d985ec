"""Count which blocks of a KV cache hold memory, and so which pages can be returned to the system.

This module only computes; a `Pool` moves the memory.

A block (vLLM's unit, for example 16 tokens) owns one span of bytes in every layer's region. A page
(4 KiB on a CPU, 2 MiB with CUDA) can overlap several spans. So each page counts the held spans that
overlap it. The pool maps a page for its first held span and releases it after its last, whatever
the order of the calls. Releasing adjacent blocks together frees the most pages. `layout_of` raises
`ValueError` for KV caches with several groups, and for layouts whose blocks are not whole spans.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import NamedTuple, Protocol

import numpy as np

Ranges = list[tuple[int, int]]  # [start, end) in bytes, ascending, neither touching nor overlapping
# A worker returns FAILED instead of a byte count when its device has no memory for the blocks.
FAILED = -1


class Pool(Protocol):
    """A range of virtual addresses whose pages can be mapped to memory and released again. A page
    that was just mapped reads as zeros."""

    page: int  # bytes
    nbytes: int  # a multiple of `page`

    def map(self, ranges: Ranges) -> None: ...

    def release(self, ranges: Ranges) -> None: ...

    def scratch(self) -> AbstractContextManager[None]:
        """Allow kernels to touch every page in this context; writes to unmapped pages are lost."""


class Layout(NamedTuple):
    """Position of the blocks in a KV cache of `nbytes` bytes. In each region r, block b owns
    `strides[r]` bytes, the first of which is `starts[r] + b * strides[r]`."""

    nbytes: int
    blocks: int
    starts: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def block_bytes(self) -> int:
        return sum(self.strides)


def layout_of(kv_cache, name: str) -> Layout:
    """Compute the layout from vLLM's `KVCacheConfig` and the name of its resolved layout. The name
    is a permutation of the axes Layer, Block, Head, tokeN, Content. Raises `ValueError` for a KV
    cache that can't be lent block by block."""
    groups = len(kv_cache.kv_cache_groups)
    if groups != 1:
        raise ValueError(
            f"the model's KV cache has {groups} groups (sliding windows, Mamba?), which share "
            "bytes; KV memory can be lent for models with one group of attention layers"
        )
    if not kv_cache.kv_cache_groups[0].kv_cache_spec.has_layer_views or kv_cache.has_mamba_layers:
        raise ValueError("a KV cache not of attention layers alone can't be lent by block")
    tensors, blocks = kv_cache.kv_cache_tensors, kv_cache.num_blocks
    if any(tensor.host_resident for tensor in tensors):
        raise ValueError("a KV cache of which part is kept on the host can't be lent by block")
    if name[0] == "B":  # A block is one span with all layers.
        spans = {0: tensors[0].block_stride}
    elif name[:2] == "LB":
        spans = {
            t.offset + i * t.layer_stride: t.block_stride
            for t in tensors
            for i in range(len(t.layers))
        }
    else:
        raise ValueError(
            f"KV cache layout {name} scatters a block over its heads; set VLLM_KV_CACHE_LAYOUT to "
            "one that begins with LB or B, as LBNHC"
        )
    return _checked(Layout(tensors[0].size, blocks, tuple(spans), tuple(spans.values())))


def _checked(layout: Layout) -> Layout:
    """Return `layout`; raise `ValueError` if its regions overlap or leave the cache."""
    starts = np.array(layout.starts)
    order, ends = np.argsort(starts), starts + layout.blocks * np.array(layout.strides)
    if (ends[order][:-1] > starts[order][1:]).any() or ends.max() > layout.nbytes:
        raise ValueError(f"KV cache regions overlap or leave its {layout.nbytes} bytes: {layout}")
    return layout


class BlockMemory:
    """The blocks of a KV cache that have memory (*held* blocks); none at first. `map` skips blocks
    that are already held, `release` skips blocks that are not."""

    def __init__(self, pool: Pool, layout: Layout) -> None:
        self.pool, self.layout = pool, layout
        self._held = np.zeros(layout.blocks, bool)
        self._spans = np.zeros(pool.nbytes // pool.page, np.int32)  # held spans per page
        self._suspended = False

    @property
    def held(self) -> int:
        """Number of blocks that have memory."""
        return int(self._held.sum())

    @property
    def mapped_bytes(self) -> int:
        return 0 if self._suspended else int((self._spans > 0).sum()) * self.pool.page

    def map(self, ids: Iterable[int]) -> int:
        """Map the memory of these blocks, so that they may be used. Return the bytes newly mapped.
        Raises `ValueError` for an id outside the cache. An error leaves all as it was."""
        runs = self._runs(ids, held=False)
        fresh = self._count(runs, 1)
        try:
            if not self._suspended:
                self.pool.map(fresh)
        except BaseException:
            self._count(runs, -1)
            raise
        for low, high in runs:
            self._held[low:high] = True
        return _total(fresh)

    def release(self, ids: Iterable[int]) -> int:
        """Release the memory of these blocks. Return the bytes released. Raises `ValueError` for
        ids outside the cache, and for block 0 (null block), which kernels touch for padding."""
        runs = self._runs(ids, held=True)
        if runs and runs[0][0] == 0:
            raise ValueError("block 0 is vLLM's null block and is never given back")
        for low, high in runs:
            self._held[low:high] = False
        idle = self._count(runs, -1)
        if not self._suspended:
            self.pool.release(idle)
        return _total(idle)

    def suspend(self) -> None:
        """Release every page, and remember which blocks were held."""
        if not self._suspended:
            self.pool.release(_ranges(np.flatnonzero(self._spans), self.pool.page))
            self._suspended = True

    def resume(self) -> None:
        """Map the pages of the held blocks again; they read as zeros."""
        if self._suspended:
            self.pool.map(_ranges(np.flatnonzero(self._spans), self.pool.page))
            self._suspended = False

    @contextmanager
    def scratch(self) -> Iterator[None]:
        """Allow kernels to touch every block in this context; only held blocks keep content."""
        with self.pool.scratch():
            yield
        self.pool.release(_ranges(np.flatnonzero(self._spans == 0), self.pool.page))

    def _runs(self, ids: Iterable[int], held: bool) -> list[tuple[int, int]]:
        """Return runs [low, high) of adjacent ids, only of blocks whose state is `held`."""
        wanted = np.unique(np.fromiter(ids, np.int64))
        if wanted.size and not (wanted[0] >= 0 and wanted[-1] < self.layout.blocks):
            raise ValueError(
                f"blocks {wanted[0]} to {wanted[-1]} asked for; the KV cache has 0 to "
                f"{self.layout.blocks - 1}"
            )
        return _ranges(wanted[self._held[wanted] == held], 1)

    def _count(self, runs: list[tuple[int, int]], change: int) -> Ranges:
        """Add `change` (1 or -1) to the counts of the pages of each span of these runs of blocks.
        Return the byte ranges of the pages that got their first span or lost their last."""
        page, turned = self.pool.page, []
        for start, stride in zip(self.layout.starts, self.layout.strides, strict=False):
            for low, high in runs:
                first, last = (start + low * stride) // page, (start + high * stride - 1) // page
                begins = np.arange(first, last + 1) * page - start
                spans = (
                    np.minimum((begins + page - 1) // stride, high - 1)
                    - np.maximum(begins // stride, low)
                    + 1
                )
                before = self._spans[first : last + 1].copy()
                self._spans[first : last + 1] += change * spans.astype(np.int32)
                turned.append(
                    first + np.flatnonzero((before > 0) != (self._spans[first : last + 1] > 0))
                )
        return _ranges(np.unique(np.concatenate(turned)) if turned else np.empty(0, np.int64), page)


def _ranges(numbers: np.ndarray, unit: int) -> Ranges:
    """Return the runs [start, end) of adjacent integers in ascending `numbers`, times `unit`."""
    if not numbers.size:
        return []
    cuts = np.flatnonzero(np.diff(numbers) != 1)
    starts, ends = numbers[np.r_[0, cuts + 1]], numbers[np.r_[cuts, numbers.size - 1]] + 1
    return [(int(low) * unit, int(high) * unit) for low, high in zip(starts, ends, strict=False)]


def _total(ranges: Ranges) -> int:
    return sum(high - low for low, high in ranges)
