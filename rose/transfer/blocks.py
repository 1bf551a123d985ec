"""Cut the tensors of a model into blocks, the unit of difference, hash and transfer. Pure.

A block has values of one tensor, in row-major order. One trainer rank writes it, and each engine
rank needs all of it or nothing. Tensors are taken as matrices: (rows, product of the other
dimensions), or (n, 1) if there is one dimension. They are cut in three kinds of places:
1. where an engine rank's part begins or ends (`Cuts`, from `rose.engine.layout.cuts`);
2. where a trainer rank's ZeRO shard begins or ends (`Shards`);
3. after at most `LARGEST` values, so that many threads have work and each needs little memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

LARGEST = 2**22  # most values of a block, 8 MiB of bfloat16


class Tensor(msgspec.Struct, frozen=True):
    name: str
    shape: tuple[int, ...]
    dtype: str  # "bfloat16" or "float32"

    @property
    def columns(self) -> int:
        return math.prod(self.shape[1:])

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * {"bfloat16": 2, "float32": 4}[self.dtype]


class Rectangle(NamedTuple):
    """The rows first_row <= r < last_row and columns first_column <= c < last_column of a tensor's
    matrix."""

    first_row: int
    last_row: int
    first_column: int
    last_column: int

    @property
    def size(self) -> int:
        return (self.last_row - self.first_row) * (self.last_column - self.first_column)


class Block(msgspec.Struct, frozen=True, array_like=True):
    """The values of tensor number `tensor` whose flat index i has start <= i < stop and
    first <= i % columns < last, in increasing order. Trainer rank `owner` writes them."""

    tensor: int
    start: int
    stop: int
    first: int
    last: int
    owner: int


# The rows and columns at which any engine rank's part ends, by the tensor's name.
Cuts = Mapping[str, tuple[Sequence[int], Sequence[int]]]
# The (owner, start, stop) of each shard in flat indices, in order, by the tensor's name.
Shards = Mapping[str, Sequence[tuple[int, int, int]]]


def cut(
    tensors: Sequence[Tensor], cuts: Cuts, shards: Shards | None, world: int, largest: int = LARGEST
) -> list[Block]:
    """Return blocks that contain every value of every tensor exactly once, in the tensors' order.

    Without `shards`, all ranks hold all values, and `share` distributes the blocks evenly over
    `world` ranks. Raises `ValueError` for a tensor that the shards don't cover exactly once."""
    blocks = [
        block
        for number, tensor in enumerate(tensors)
        for block in _cut(
            number,
            tensor,
            *cuts.get(tensor.name, ((), ())),
            shards[tensor.name] if shards is not None else [(0, 0, tensor.size)],
            largest,
        )
    ]
    if shards is None:
        owners = share([size(block, tensors[block.tensor].columns) for block in blocks], world)
        blocks = [
            msgspec.structs.replace(block, owner=owner)
            for block, owner in zip(blocks, owners, strict=True)
        ]
    return blocks


def _cut(
    number: int,
    tensor: Tensor,
    row_cuts: Sequence[int],
    column_cuts: Sequence[int],
    shards: Sequence[tuple[int, int, int]],
    largest: int,
) -> Iterator[Block]:
    """Yield the blocks of one tensor."""
    columns = tensor.columns
    ends = [start for _, start, _ in shards[1:]] + [tensor.size]
    if [(s, e) for _, s, e in shards] != list(zip([0, *ends[:-1]], ends, strict=False)):
        raise ValueError(
            f"tensor {tensor.name!r} of {tensor.size} values: the shards {list(shards)} don't "
            "cover it exactly once"
        )
    bands = sorted({0, columns, *column_cuts})
    for owner, start, stop in shards:
        limits = sorted(
            {start, stop, *(row * columns for row in row_cuts if start < row * columns < stop)}
        )
        for low, high in zip(limits, limits[1:], strict=False):
            for first, last in zip(bands, bands[1:], strict=False):
                step = max(1, largest // (last - first)) * columns  # whole rows
                if last - first == columns and columns > largest:
                    step = largest
                # Cuts at row boundaries make every block a rectangle, except at a shard's ends.
                points = sorted({low, high, *range((low // step + 1) * step, high, step)})
                for a, b in zip(points, points[1:], strict=False):
                    block = Block(number, a, b, first, last, owner)
                    if size(block, columns):
                        yield block


def size(block: Block, columns: int) -> int:
    """Return the number of values in the block."""
    return _count_before(block.stop, block, columns) - _count_before(block.start, block, columns)


def _count_before(index: int, block: Block, columns: int) -> int:
    """Return how many values in the block's columns have a flat index below `index`."""
    row, column = divmod(index, columns)
    width = block.last - block.first
    return row * width + min(max(column - block.first, 0), width)


def rectangles(block: Block, columns: int) -> list[Rectangle]:
    """Return the block as at most three rectangles, in order: the end of a row, whole rows, and the
    beginning of a row, all within the block's columns."""
    row, column = divmod(block.start, columns)
    last_row, last_column = divmod(block.stop, columns)
    low, high = block.first, block.last
    if row == last_row:
        found = [Rectangle(row, row + 1, max(low, column), min(high, last_column))]
    else:
        found = []
        if column > low:
            found.append(Rectangle(row, row + 1, column, high))
            row += 1
        whole = last_row + (last_column >= high)
        found.append(Rectangle(row, whole, low, high))
        if low < last_column < high:
            found.append(Rectangle(last_row, last_row + 1, low, last_column))
    return [r for r in found if r.first_row < r.last_row and r.first_column < r.last_column]


def take(values, offset: int, block: Block, columns: int) -> list:
    """Return the pieces of `values` that make up the block, in order, as views with one or two
    dimensions. `values` (ndarray or torch tensor) is the flat tensor from index `offset` on."""
    if block.first == 0 and block.last == columns:
        return [values[block.start - offset : block.stop - offset]]
    pieces = []
    for r in rectangles(block, columns):
        begin = r.first_row * columns + r.first_column - offset
        height = r.last_row - r.first_row
        width = r.last_column - r.first_column
        # A view by strides: `values` may end within the last row, so a reshape can fail.
        run = values[begin : begin + (height - 1) * columns + width]
        if isinstance(run, np.ndarray):
            pieces.append(
                np.lib.stride_tricks.as_strided(
                    run, (height, width), (columns * run.itemsize, run.itemsize)
                )
            )
        else:
            pieces.append(run.as_strided((height, width), (columns, 1)))
    return pieces


def share(sizes: Sequence[int], world: int) -> list[int]:
    """Return a rank for each block size: largest first, each to the rank with the least load."""
    loads, owners = [0] * world, [0] * len(sizes)
    for i in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        owners[i] = loads.index(min(loads))
        loads[owners[i]] += sizes[i]
    return owners
