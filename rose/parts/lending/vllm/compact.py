"""Choose the blocks of a KV cache that an engine uses, so that they occupy few pages. Pure.

A page is released when no block in it is used. On a GPU a page (2 MiB) has parts of several blocks.
A tenth of the blocks can occupy a third or all of the pages if they are scattered. So an engine
uses the blocks with the lowest numbers (the low end). Requests that hold higher blocks keep these
and their pages until they end. Free blocks in such pages are used only if the low end doesn't
suffice. As requests come and go, the used blocks move to the low end.
"""

from __future__ import annotations

import numpy as np

from rose.parts.lending.vllm.blocks import Layout


class Pages:
    """The pages of `page` bytes behind a KV cache. If no page has parts of two blocks, all pages of
    a block count as one page."""

    def __init__(self, layout: Layout, page: int) -> None:
        starts = np.array(layout.starts, np.int64)[:, None]
        strides = np.array(layout.strides, np.int64)[:, None]
        ids = np.arange(layout.blocks, dtype=np.int64)[None, :]
        # True if no page has parts of two blocks.
        self.alone = not (starts % page).any() and not (strides % page).any()
        if self.alone:
            self.page = layout.block_bytes
            self._first = self._last = ids
        else:
            self.page = page
            self._first = (starts + ids * strides) // page
            self._last = (starts + (ids + 1) * strides - 1) // page
        self._count = int(self._last.max()) + 1
        self._base = self._marked(ids[0] == 0)  # pages of vLLM's null block, never released

    @property
    def grain(self) -> int:
        """Most bytes of pages that mapping one more block can take."""
        return int((self._last - self._first + 1).sum(axis=0).max()) * self.page

    def nbytes(self, used: np.ndarray) -> int:
        """Bytes of the pages of the blocks `used`, (blocks,) bool; the null block's don't count."""
        return int((self._marked(used) & ~self._base).sum()) * self.page

    def choose(self, held: np.ndarray, wanted: float, most: float) -> np.ndarray:
        """Choose the blocks to use, (blocks,) bool. Takes all blocks of `held`, (blocks,) bool: the
        blocks that requests hold, and the null block. Adds others until there are `wanted` blocks,
        or until their pages take `most` bytes. Neither number includes the null block."""
        kept = self._marked(held) | self._base
        fresh = np.concatenate(([0], np.cumsum(~kept)))
        # For each block, the first page that the block below it doesn't occupy.
        before = np.maximum(self._first[:, 1:], self._last[:, :-1] + 1)
        added = np.cumsum((fresh[self._last[:, 1:] + 1] - fresh[before]).sum(axis=0))
        room = min(most, self._count * self.page) // self.page - int((kept & ~self._base).sum())
        lacking = wanted - (int(held.sum()) - 1)
        free = ~held
        below = np.cumsum(free[1:])
        # `added` counts a page twice where two regions meet. So room for all pages is a case of its
        # own, in which all blocks fit.
        if room >= self._count - int(kept.sum()):
            fits = added.size
        else:
            fits = int(np.searchsorted(added, room, "right")) if room > 0 else 0
        low = min(fits, int(np.searchsorted(below, lacking)) + 1 if lacking > 0 else 0)
        chosen = held.copy()
        chosen[1 : 1 + low] = True
        lacking = wanted - (int(chosen.sum()) - 1)
        if lacking > 0:  # Add blocks in pages that are kept anyway.
            bare = ~self._marked(chosen | (np.arange(held.size) == 0))
            whole = np.concatenate(([0], np.cumsum(bare)))
            fresh_pages = (whole[self._last + 1] - whole[self._first]).any(axis=0)
            holes = np.flatnonzero(~chosen & ~fresh_pages)
            chosen[holes[: int(min(lacking, holes.size))]] = True
        return chosen

    def _marked(self, used: np.ndarray) -> np.ndarray:
        """Return the pages that have a part of a block in `used`, (pages,) bool."""
        change = np.bincount(self._first[:, used].ravel(), minlength=self._count + 1)
        change -= np.bincount(self._last[:, used].ravel() + 1, minlength=self._count + 1)
        return np.cumsum(change)[:-1] > 0
