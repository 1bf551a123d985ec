"""Every value is in exactly one block, and no block is needed half."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rose.transfer.blocks import Block, Tensor, cut, rectangles, share, size, take


def members(block: Block, columns: int) -> list[int]:
    """Straight from the definition."""
    return [i for i in range(block.start, block.stop) if block.first <= i % columns < block.last]


@st.composite
def models(draw):
    shape = draw(st.sampled_from([(7,), (6, 5), (9, 4), (1, 8), (12, 1), (3, 2, 2)]))
    tensor = Tensor("t", shape, "bfloat16")
    rows = draw(st.lists(st.integers(0, shape[0]), max_size=3))
    columns = draw(st.lists(st.integers(0, tensor.columns), max_size=3))
    ends = sorted(draw(st.lists(st.integers(0, tensor.size), max_size=3)))
    shards = list(zip(range(len(ends) + 1), [0, *ends], [*ends, tensor.size], strict=False))
    return tensor, (rows, columns), shards, draw(st.sampled_from([1, 3, 10, 1000]))


@given(models())
@settings(max_examples=300, deadline=None)
def test_blocks_cover_a_tensor_once_within_their_shard_and_cross_no_cut(model):
    tensor, (rows, columns), shards, largest = model
    blocks = cut([tensor], {"t": (rows, columns)}, {"t": shards}, len(shards), largest)
    found = [members(block, tensor.columns) for block in blocks]
    assert sorted(i for part in found for i in part) == list(range(tensor.size))
    for block, part in zip(blocks, found, strict=False):
        _, start, stop = shards[block.owner]
        assert start <= part[0] and part[-1] < stop
        assert size(block, tensor.columns) == len(part)
        assert len(part) <= max(largest, 2 * tensor.columns)
        for row in rows:
            assert len({i // tensor.columns < row for i in part}) == 1
        for column in columns:
            assert len({i % tensor.columns < column for i in part}) == 1


@given(models())
@settings(max_examples=300, deadline=None)
def test_rectangles_and_pieces_of_a_shard_are_the_blocks_values_in_order(model):
    tensor, cuts, shards, largest = model
    flat = np.arange(tensor.size)
    for block in cut([tensor], {"t": cuts}, {"t": shards}, len(shards), largest):
        expected = members(block, tensor.columns)
        matrix = flat.reshape(-1, tensor.columns)
        parts = [
            matrix[r.first_row : r.last_row, r.first_column : r.last_column].ravel()
            for r in rectangles(block, tensor.columns)
        ]
        assert len(parts) <= 3 and np.concatenate(parts).tolist() == expected
        _, start, stop = shards[block.owner]
        for values in (flat[start:stop], torch.arange(tensor.size)[start:stop]):
            pieces = take(values, start, block, tensor.columns)
            assert [int(i) for piece in pieces for i in piece.reshape(-1)] == expected


def test_without_shards_blocks_are_shared_evenly():
    tensors = [Tensor("a", (100, 10), "float32"), Tensor("b", (50,), "float32")]
    blocks = cut(tensors, {}, None, 2, largest=100)
    loads = [
        sum(size(b, tensors[b.tensor].columns) for b in blocks if b.owner == rank)
        for rank in range(2)
    ]
    assert sum(loads) == 1050 and abs(loads[0] - loads[1]) <= 50
    assert share([1000, 10, 500, 490, 5, 5], 2) == share([1000, 10, 500, 490, 5, 5], 2)
    assert share([3, 1, 2], 1) == [0, 0, 0]


@pytest.mark.parametrize(
    "shards", [[(0, 0, 10)], [(0, 0, 12), (1, 14, 20)], [(0, 0, 12), (1, 10, 20)], [(0, 1, 20)]]
)
def test_shards_that_leave_values_out_or_name_them_twice_are_refused(shards):
    with pytest.raises(ValueError, match="don't cover it exactly once"):
        cut([Tensor("t", (4, 5), "bfloat16")], {}, {"t": shards}, 2)
