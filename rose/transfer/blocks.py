"""How the tensors of a model are cut into blocks, the unit of difference, hash and transfer. Pure.

A block is a run of one tensor's values, in row-major order, that one trainer rank writes and that
each server needs whole or not at all. Tensors are taken as matrices: (rows, product of the other
dimensions), and (n, 1) where there is one dimension. Three kinds of cuts meet: where a
tensor-parallel server's part begins or ends (`Cuts`, from `rose.engine.layout.cuts`), where a
trainer rank's ZeRO shard begins or ends (`Shards`), and every `LARGEST` values, so that many
threads have work and nobody holds much at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

LARGEST = 2**22  # values: 8 MiB of bfloat16


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
    """Rows first_row <= r < last_row and columns first_column <= c < last_column of a tensor's
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
    first <= i % columns < last, in increasing order; written by trainer rank `owner`."""

    tensor: int
    start: int
    stop: int
    first: int
    last: int
    owner: int


# tensor -> rows and columns where some server's part ends
Cuts = Mapping[str, tuple[Sequence[int], Sequence[int]]]
# tensor -> (owner, start, stop) of flat indices, in order
Shards = Mapping[str, Sequence[tuple[int, int, int]]]


def cut(
    tensors: Sequence[Tensor], cuts: Cuts, shards: Shards | None, world: int, largest: int = LARGEST
) -> list[Block]:
    """Every value of every tensor in exactly one block, in the order of the tensors.

    Without `shards` (all ranks hold all values) the blocks are shared out evenly, largest first.
    Raises `ValueError` for a tensor that the shards don't cover exactly once.
    """
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
    columns = tensor.columns
    ends = [start for _, start, _ in shards[1:]] + [tensor.size]
    if [(s, e) for _, s, e in shards] != list(zip([0, *ends[:-1]], ends, strict=False)):
        raise ValueError(
            f"tensor {tensor.name!r} of {tensor.size} values: the shards {list(shards)} don't "
            "cover it exactly once"
        )
    bands = sorted({0, columns, *column_cuts})
    for owner, start, stop in shards:
        edges = sorted(
            {start, stop, *(row * columns for row in row_cuts if start < row * columns < stop)}
        )
        for low, high in zip(edges, edges[1:], strict=False):
            for first, last in zip(bands, bands[1:], strict=False):
                step = max(1, largest // (last - first)) * columns  # whole rows
                if last - first == columns and columns > largest:
                    step = largest
                # at row boundaries, so that a block is a rectangle but at its shard's ends
                points = sorted({low, high, *range((low // step + 1) * step, high, step)})
                for a, b in zip(points, points[1:], strict=False):
                    block = Block(number, a, b, first, last, owner)
                    if size(block, columns):
                        yield block


def size(block: Block, columns: int) -> int:
    """How many values the block has."""
    return _before(block.stop, block, columns) - _before(block.start, block, columns)


def _before(index: int, block: Block, columns: int) -> int:
    row, column = divmod(index, columns)
    width = block.last - block.first
    return row * width + min(max(column - block.first, 0), width)


def rectangles(block: Block, columns: int) -> list[Rectangle]:
    """At most three whose values, each row-major, one after the other, are the block's: the end of
    a row, whole rows of the band, the beginning of a row."""
    (row, column), (last_row, last_column) = (
        divmod(block.start, columns),
        divmod(block.stop, columns),
    )
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
    """The pieces of `values`, a flat run of the tensor from flat index `offset` on (ndarray or
    torch tensor), that make up the block, in order: views of one or two dimensions."""
    if block.first == 0 and block.last == columns:
        return [values[block.start - offset : block.stop - offset]]
    pieces = []
    for r in rectangles(block, columns):
        begin, height, width = (
            r.first_row * columns + r.first_column - offset,
            r.last_row - r.first_row,
            r.last_column - r.first_column,
        )
        # strided rather than reshaped: the last row may end with the band, not with the tensor's
        # columns
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
    """Owner of each size: largest first, to the rank with least."""
    loads, owners = [0] * world, [0] * len(sizes)
    for i in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        owners[i] = loads.index(min(loads))
        loads[owners[i]] += sizes[i]
    return owners
