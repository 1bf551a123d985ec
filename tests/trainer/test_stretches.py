"""Attention by stretches has the values and gradients of a dense mask."""

import numpy as np
import pytest
import torch

from rose.trainer import prefix_tree, stretches
from tests.trainer.test_prefix_tree import ROWS, packed


def random_tree(seed):
    """Rows of few different tokens, which leave each other everywhere; or long ones."""
    random = np.random.default_rng(seed)
    if seed % 2:
        return packed([random.integers(0, 2, random.integers(1, 12)).tolist() for _ in range(20)])
    shared, own = random.integers(0, 400, 6), random.integers(1, 300, 6)
    return prefix_tree.build_from_rows(shared.tolist(), own.tolist())


def test_a_stretch_ends_where_a_row_leaves_or_ends():
    tree = packed(ROWS)  # 1 2 3 | 4 | 5, then 6 6, then 9; 7 8
    assert tree.tokens.tolist() == [1, 2, 3, 4, 5, 6, 6, 9, 7, 8]
    found = stretches.find(tree.ends)[0, 0].tolist()
    assert found == [[0, 3, 8], [3, 4, 7], [4, 5, 5], [5, 7, 7], [7, 8, 8], [8, 10, 10]]


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (3, 1)])
@pytest.mark.parametrize("seed", range(4))
def test_values_and_gradients_are_those_of_the_dense_mask(seed, heads, kv_heads):
    tree = random_tree(seed)
    torch.manual_seed(seed)
    length = len(tree.tokens)
    leaves = [torch.randn(1, n, length, 16) for n in (heads, kv_heads, kv_heads)]
    weights = torch.randn(1, heads, length, 16)

    def by_stretches(query, key, value):
        return stretches.attention(query, key, value, stretches.find(tree.ends), 0.3)

    def dense(query, key, value):
        key, value = (x.repeat_interleave(heads // kv_heads, 1) for x in (key, value))
        scores = (query @ key.transpose(2, 3) * 0.3).masked_fill(~tree.attention(), -torch.inf)
        return scores.softmax(-1) @ value

    found = []
    for attention, dtype in ((by_stretches, torch.float32), (dense, torch.float64)):
        inputs = [x.to(dtype, copy=True).requires_grad_() for x in leaves]
        values = attention(*inputs)
        (values * weights).sum().backward()
        found.append([values.detach(), *(x.grad for x in inputs)])
    for ours, exact in zip(*found, strict=True):
        most = float(exact.abs().max())
        torch.testing.assert_close(ours.double(), exact, rtol=0, atol=2e-5 * most)
