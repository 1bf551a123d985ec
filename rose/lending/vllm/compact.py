"""Which blocks of a KV cache an engine should use, so that they lie in few pages. Pure.

A page goes back to the system when no block in it is used. On a GPU a page (2 MiB) holds parts of
several blocks, so that a tenth of the blocks, strewn about, keep a third or all of the pages. So an
engine is given the blocks from the low end on; above them those that requests hold keep their pages
until they end, and what is free in these pages is only used when the low end doesn't suffice. Thus
what is used moves to the low end as requests come and go.
"""

from __future__ import annotations

import numpy as np

from rose.engine.blocks import Layout


class Pages:
    """`page`: bytes. Blocks that share no page with each other count as one page of their size."""

    def __init__(self, layout: Layout, page: int) -> None:
        starts = np.array(layout.starts, np.int64)[:, None]
        strides = np.array(layout.strides, np.int64)[:, None]
        ids = np.arange(layout.blocks, dtype=np.int64)[None, :]
        # no page has parts of two blocks
        self.alone = not (starts % page).any() and not (strides % page).any()
        if self.alone:
            self.page = layout.block_bytes
            self._first = self._last = ids
        else:
            self.page = page
            self._first = (starts + ids * strides) // page
            self._last = (starts + (ids + 1) * strides - 1) // page
        self._count = int(self._last.max()) + 1
        self._base = self._marked(ids[0] == 0)  # vLLM's null block, which is never given back

    @property
    def grain(self) -> int:
        """Bytes that mapping one more block takes at most."""
        return int((self._last - self._first + 1).sum(axis=0).max()) * self.page

    def nbytes(self, used: np.ndarray) -> int:
        """Bytes of the pages with any of the blocks `used` (bool, one a block) beyond those of the
        null block."""
        return int((self._marked(used) & ~self._base).sum()) * self.page

    def choose(self, held: np.ndarray, wanted: float, most: float) -> np.ndarray:
        """The blocks to use, as bool: all `held` (the null block is), and of the others as many as
        make `wanted` blocks (the null block not counted) while their pages beyond the null block's
        take at most `most` bytes."""
        kept = self._marked(held) | self._base
        fresh = np.concatenate(([0], np.cumsum(~kept)))
        # pages not begun by the block below
        before = np.maximum(self._first[:, 1:], self._last[:, :-1] + 1)
        added = np.cumsum((fresh[self._last[:, 1:] + 1] - fresh[before]).sum(axis=0))
        room = min(most, self._count * self.page) // self.page - int((kept & ~self._base).sum())
        lacking = wanted - (int(held.sum()) - 1)
        free = ~held
        below = np.cumsum(free[1:])
        # all of it; where regions meet `added` counts a page twice
        if room >= self._count - int(kept.sum()):
            fits = added.size
        else:
            fits = int(np.searchsorted(added, room, "right")) if room > 0 else 0
        low = min(fits, int(np.searchsorted(below, lacking)) + 1 if lacking > 0 else 0)
        chosen = held.copy()
        chosen[1 : 1 + low] = True
        lacking = wanted - (int(chosen.sum()) - 1)
        if lacking > 0:  # what lies in pages that are kept anyway
            bare = ~self._marked(chosen | (np.arange(held.size) == 0))
            whole = np.concatenate(([0], np.cumsum(bare)))
            fresh_pages = (whole[self._last + 1] - whole[self._first]).any(axis=0)
            holes = np.flatnonzero(~chosen & ~fresh_pages)
            chosen[holes[: int(min(lacking, holes.size))]] = True
        return chosen

    def _marked(self, used: np.ndarray) -> np.ndarray:
        """bool, one a page: those with any of these blocks."""
        change = np.bincount(self._first[:, used].ravel(), minlength=self._count + 1)
        change -= np.bincount(self._last[:, used].ravel() + 1, minlength=self._count + 1)
        return np.cumsum(change)[:-1] > 0
