"""Sketch of publish and flip on the device. Exact beside rose.transfer.codec (Triton's interpreter), and on an H200.

Publish: `changes(master, held)` compares the float32 partition that the optimizer has just stepped with the bfloat16
partition that ZeRO has not overwritten yet (DeepSpeedEngine._update_and_signal's hook): no copy of the last version is kept.
Flip: `apply_(live, at, by)`; `apply_(live, at, -by)` takes it back, so no old value is read when staging.
"""

import torch
import triton
import triton.language as tl

TILE = tl.constexpr(4096)


@triton.jit
def _look(master, held, at, n):
    inside = at < n
    bits = tl.load(master + at, mask=inside, other=0.0).to(tl.int32, bitcast=True)
    # Rounded to bfloat16, nearest even.
    new = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).to(tl.int16)
    old = tl.load(held + at, mask=inside, other=0)
    new = tl.where(inside, new, old)
    return new, old, (new != old) & inside


@triton.jit
def _order(x):
    x = x.to(tl.int32)
    return tl.where(x < 0, x ^ 0x7FFF, x)


@triton.jit
def _count(master, held, counts, n):
    tile = tl.program_id(0).to(tl.int64)
    _, _, changed = _look(master, held, tile * TILE + tl.arange(0, TILE), n)
    tl.store(counts + tile, tl.sum(changed.to(tl.int32), 0))


@triton.jit
def _emit(master, held, ends, at_out, by_out, n):
    tile = tl.program_id(0).to(tl.int64)
    at = tile * TILE + tl.arange(0, TILE)
    new, old, changed = _look(master, held, at, n)
    ones = changed.to(tl.int32)
    total = tl.sum(ones, 0)
    place = tl.load(ends + tile) - total + tl.cumsum(ones, 0) - ones
    tl.store(at_out + place, at.to(tl.int32), mask=changed)
    tl.store(by_out + place, (_order(new) - _order(old)).to(tl.int16), mask=changed)


@triton.jit
def _apply(live, at, by, count, SIGN: tl.constexpr, SIZE: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    inside = i < count
    where = tl.load(at + i, mask=inside, other=0)
    moved = _order(tl.load(live + where, mask=inside, other=0)) + SIGN * tl.load(
        by + i, mask=inside, other=0
    ).to(tl.int32)
    moved = moved.to(tl.int16)  # modulo 2^16
    tl.store(live + where, _order(moved).to(tl.int16), mask=inside)


def changes(master, held):
    """Return the changed positions, (c,) int32, and their differences, (c,) int16, of (n,) float32
    values and (n,) int16 patterns."""
    n = master.numel()
    tiles = triton.cdiv(n, TILE.value)
    counts = torch.empty(tiles, dtype=torch.int32, device=master.device)
    _count[(tiles,)](master, held, counts, n)
    ends = counts.cumsum(0)
    c = int(ends[-1])  # the only wait for the device
    at = torch.empty(c, dtype=torch.int32, device=master.device)
    by = torch.empty(c, dtype=torch.int16, device=master.device)
    if c:
        _emit[(tiles,)](master, held, ends, at, by, n)
    return at, by


def apply_(live, at, by, sign=1):
    _apply[(triton.cdiv(max(1, at.numel()), 1024),)](live, at, by, at.numel(), sign, 1024)
