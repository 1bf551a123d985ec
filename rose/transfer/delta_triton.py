"""Compare, compact and apply differences of weights in a GPU's memory with Triton.

`compare` and `compact` find what an optimizer's step changes. They read the step's float32 values,
round them to bfloat16, and compare them with the bfloat16 values before the step. `move` adds
differences to live weights. Differences are in the order of the floats, as
rose/transfer/payload.py specifies it. The twins for a CPU are `scan` and `add` of
rose/transfer/rice.py. Importing this module imports Triton, which comes with torch for GPUs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

TILE = 4096  # values that one program compares
MOVED = 1024  # values that one program moves
_TILE, _MOVED = tl.constexpr(TILE), tl.constexpr(MOVED)


@triton.jit
def _ordered(patterns, LOW: tl.constexpr):
    """Map signed patterns to int32 numbers in the order of their floats; its own inverse."""
    patterns = patterns.to(tl.int32)
    return tl.where(patterns < 0, patterns ^ LOW, patterns)


@triton.jit
def _both(master, held, tile, n):
    """Return a tile's new and old patterns, and which values differ."""
    at = tile * _TILE + tl.arange(0, _TILE)
    inside = at < n
    bits = tl.load(master + at, mask=inside, other=0.0).to(tl.int32, bitcast=True)
    # Round to the nearest bfloat16, ties to even.
    new = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).to(tl.int16)
    old = tl.load(held + at, mask=inside, other=0)
    return new, old, (new != old) & inside


@triton.jit
def _compare(master, held, counts, n):
    """Count the changed values of each tile."""
    tile = tl.program_id(0).to(tl.int64)
    _, _, changed = _both(master, held, tile, n)
    tl.store(counts + tile, tl.sum(changed.to(tl.int32), 0))


@triton.jit(do_not_specialize=["first", "before"])
def _compact(master, held, ends, positions, differences, first, before, n):
    """Write the changed positions of each tile, and their differences."""
    tile = tl.program_id(0).to(tl.int64)
    new, old, changed = _both(master, held, first + tile, n)
    ones = changed.to(tl.int32)
    end = tl.load(ends + first + tile) - before
    place = end - tl.sum(ones, 0) + tl.cumsum(ones, 0) - ones
    at = (tile * _TILE).to(tl.int32) + tl.arange(0, _TILE)
    tl.store(positions + place, at, mask=changed)
    difference = _ordered(new, 0x7FFF) - _ordered(old, 0x7FFF)
    tl.store(differences + place, difference.to(tl.int16), mask=changed)


@triton.jit(do_not_specialize=["count", "sign"])
def _move(live, indices, differences, count, sign, LOW: tl.constexpr):
    """Add `sign` times the differences to the live patterns at `indices`."""
    i = tl.program_id(0).to(tl.int64) * _MOVED + tl.arange(0, _MOVED)
    inside = i < count
    at = tl.load(indices + i, mask=inside, other=0).to(tl.int64)
    by = tl.load(differences + i, mask=inside, other=0).to(tl.int32)
    moved = _ordered(tl.load(live + at, mask=inside, other=0), LOW) + sign * by
    moved = moved.to(live.dtype.element_ty)  # modulo 2^16 or 2^32
    tl.store(live + at, _ordered(moved, LOW).to(live.dtype.element_ty), mask=inside)


def compare(master: torch.Tensor, held: torch.Tensor) -> torch.Tensor:
    """Return how many values of each tile, a run of `TILE`, differ: (tiles,) int32. Compares
    `master` (n,) float32, rounded to bfloat16, with `held` (n,) int16 patterns."""
    n = master.numel()
    counts = torch.empty(triton.cdiv(n, TILE), dtype=torch.int32, device=master.device)
    if n:
        _compare[(len(counts),)](master, held, counts, n)
    return counts


def compact(
    master: torch.Tensor,
    held: torch.Tensor,
    ends: torch.Tensor,
    tiles: tuple[int, int],
    counts: tuple[int, int],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the changed positions (c,) int32 and their differences (c,) int16 of the tiles from
    `tiles[0]` to `tiles[1]`. Positions count from the first tile's begin. `ends` (tiles,) int64 is
    the running sum of `compare`'s result; `counts` are its values before and after these tiles."""
    (first, last), (before, after) = tiles, counts
    positions = torch.empty(after - before, dtype=torch.int32, device=master.device)
    differences = torch.empty(after - before, dtype=torch.int16, device=master.device)
    if after > before:
        _compact[(last - first,)](
            *(master, held, ends, positions, differences, first, before, master.numel())
        )
    return positions, differences


def move(
    live: torch.Tensor,
    indices: torch.Tensor,
    differences: torch.Tensor,
    sign: int,
    count: int | None = None,
) -> None:
    """Add `sign` times `differences` (c,) to patterns of `live` (n,), of the same type, int16 or
    int32. Their `indices` (c,) int32 or int64 are all different. `count` 0 only compiles."""
    count = len(indices) if count is None else count
    low = 0x7FFF if live.element_size() == 2 else 0x7FFFFFFF
    programs = max(1, triton.cdiv(count, MOVED))
    _move[(programs,)](live, indices, differences, count, sign, low)
