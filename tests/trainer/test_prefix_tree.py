"""A prefix tree gives the numbers and gradients of separate rows, and says which models it is not
for."""

import numpy as np
import pytest
import torch
import transformers

from rose.trainer import model, prefix_tree, stretches
from rose.trainer.collate import collate
from tests.trainer import tiny_world
from tests.trainer.test_collate import trajectory

ROWS = [[1, 2, 3, 4, 5], [1, 2, 3, 9], [7, 8], [1, 2, 3, 4, 5], [1, 2], [1, 2, 3, 4, 6, 6]]


def packed(rows):
    lengths = np.array([len(row) for row in rows])
    inputs = np.zeros((len(rows), lengths.max()), np.int64)
    for i, row in enumerate(rows):
        inputs[i, : len(row)] = row
    return prefix_tree.build(inputs, lengths)


def test_each_distinct_prefix_stands_once_and_attends_to_its_ancestors_and_itself_only():
    tree = packed(ROWS)
    attention = tree.attention()[0, 0]
    assert len(tree.tokens) == len({tuple(row[:n]) for row in ROWS for n in range(1, len(row) + 1)})
    for row, nodes in zip(ROWS, tree.nodes, strict=True):
        assert tree.tokens[nodes[: len(row)]].tolist() == row
        assert tree.depths[nodes[: len(row)]].tolist() == list(range(len(row)))
        for depth, node in enumerate(nodes[: len(row)].tolist()):
            found = attention[node].nonzero().flatten().tolist()
            assert found == sorted(nodes[: depth + 1].tolist())


def computed(policy, batch):
    """(log-probabilities, entropy, the gradient of each parameter)"""
    policy.zero_grad()
    logprobs, entropy = policy(batch.inputs, batch.targets, batch.mask, batch.tree)
    (logprobs**2).sum().backward()
    return logprobs.detach(), entropy, [p.grad.clone() for p in policy.parameters()]


def assert_alike(found, expected, entropy_atol=1e-3):
    """Compare two results of `computed`, each gradient relative to its largest value."""
    torch.testing.assert_close(found[0], expected[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found[1], expected[1], atol=entropy_atol, rtol=1e-5)
    for ours, theirs in zip(found[2], expected[2], strict=True):
        atol = 1e-5 * float(theirs.abs().max())
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=atol)


@pytest.mark.parametrize("by_stretches", [False, True])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_values_and_gradients_are_those_of_padded_rows(tmp_path, checkpointing, by_stretches):
    policy = model.load(tiny_world.save_model(tmp_path), torch.float32, checkpointing).train()
    if by_stretches:
        policy.use_stretches()
    rows, _ = tiny_world.make_batch(seed=1)
    # one twice, one with nothing to learn
    rows |= {8: rows[0], 9: trajectory([1, 2, 3], [0, 0, 0])}
    plain, shared = (
        collate(list(rows), rows, tiny_world.VOCABULARY, trees) for trees in (False, True)
    )
    assert plain.tree is None and shared.tree is not None
    assert_alike(computed(policy, shared), computed(policy, plain))


@pytest.mark.parametrize(
    ("family", "more", "words"),
    [
        ("Qwen3", {}, None),
        ("Llama", {}, None),
        ("Qwen2", {"use_sliding_window": False}, None),
        ("Qwen2", {"use_sliding_window": True, "max_window_layers": 2}, "sliding_attention"),
        ("Mistral", {"sliding_window": 4096}, "sliding"),
        ("Mistral", {"sliding_window": None}, None),
        ("GPT2", {}, "not rotary"),
    ],
)
def test_models_that_a_tree_would_falsify_are_told_apart(tmp_path, family, more, words):
    config = getattr(transformers, f"{family}Config")(**more)
    config.save_pretrained(tmp_path)
    found = prefix_tree.obstacle(transformers.AutoConfig.from_pretrained(tmp_path))
    assert found is None if words is None else words in found


# ---------------------------------------------------------------- attention by stretches


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
