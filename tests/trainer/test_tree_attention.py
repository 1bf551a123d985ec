"""Flex attention over a tree: which blocks it is given, and that its mask gives the numbers and
gradients of rows. Its own kernels train on GPUs only; here `by_mask` stands for them."""

import numpy as np
import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

from rose.config import ModelShape
from rose.protocol import unpack_tokens
from rose.trainer import batching, costs, model, prefix_tree, tree_attention
from rose.trainer.collate import collate
from rose.trainer.tree_attention import BLOCK
from tests.trainer import tiny_world
from tests.trainer.test_collate import trajectory
from tests.trainer.test_prefix_tree import assert_alike, computed, packed

CPU = torch.device("cpu")
SIZES = {"layers": 2, "hidden": 64, "intermediate": 128, "heads": 6, "kv_heads": 2, "head_dim": 16}
SHAPE = ModelShape(**SIZES, vocab=97, tied_embeddings=True)
NUMBERS = ("kv_num_blocks", "full_kv_num_blocks", "q_num_blocks", "full_q_num_blocks")


def random_tree(seed):
    random = np.random.default_rng(seed)
    rows = int(random.integers(1, 9))
    shared, own = random.integers(0, 400, rows), random.integers(1, 500, rows)
    return prefix_tree.build_from_rows(shared.tolist(), own.tolist())


def by_mask(query, key, value, block_mask, scale, enable_gqa):
    """Compute what flex attention's kernels compute of the mask alone."""
    assert enable_gqa
    groups, at = query.shape[1] // key.shape[1], torch.arange(query.shape[2])
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = query @ key.transpose(2, 3) * (scale or query.shape[-1] ** -0.5)
    seen = block_mask.mask_mod(0, 0, at[:, None], at)
    return scores.masked_fill(~seen, -torch.inf).softmax(-1) @ value


@pytest.mark.parametrize("seed", range(6))
def test_blocks_are_those_that_torch_finds_in_the_dense_mask(seed):
    tree = tree_attention.padded(random_tree(seed))
    ours, length = tree_attention.block_mask(tree.ends), len(tree.tokens)
    theirs = create_block_mask(ours.mask_mod, 1, None, length, length, device="cpu")
    assert torch.equal(ours.to_dense(), theirs.to_dense())
    assert all(torch.equal(getattr(ours, name), getattr(theirs, name)) for name in NUMBERS)
    seen = ours.mask_mod(0, 0, torch.arange(length)[:, None], torch.arange(length))
    assert torch.equal(seen, tree.attention()[0, 0])
    blocks = seen.view(length // BLOCK, BLOCK, -1, BLOCK).all(3).all(1)
    for row, full, count in zip(
        blocks, ours.full_kv_indices[0, 0], ours.full_kv_num_blocks[0, 0], strict=False
    ):
        assert row[full[:count].long()].all()


def test_a_tree_that_ranks_share_has_like_parts_of_whole_blocks():
    tree = random_tree(1)
    for parts, flex, step in ((3, False, 3), (6, True, 384), (1, True, 128), (1, False, 1)):
        grown, _ = tree_attention.attended(tree, flex, parts)
        least = max(len(tree.tokens), tree_attention.SMALLEST * flex)
        assert len(grown.tokens) % step == 0 and 0 <= len(grown.tokens) - least < step


def test_padding_is_seen_by_nobody_and_fills_blocks():
    tree = prefix_tree.build_from_rows([3, 3], [2, 1])
    grown = tree_attention.padded(tree)
    assert len(grown.tokens) == tree_attention.SMALLEST and tree_attention.SMALLEST % BLOCK == 0
    attention = grown.attention()[0, 0]
    assert torch.equal(attention[:6, :6], tree.attention()[0, 0]) and not attention[:6, 6:].any()
    assert torch.equal(attention[6:], torch.eye(len(grown.tokens), dtype=torch.bool)[6:])


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (6, 2), (7, 1)])
def test_torchs_flex_attention_over_the_blocks_is_the_dense_mask(heads, kv_heads):
    # dynamo, which it needs even where it isn't compiled
    with torch._dynamo.config.patch(disable=False):
        assert tree_attention.difference(CPU, heads, kv_heads, 16, torch.float32) < 1e-5


def long_batch(trees):
    """Rows longer than a block, in two groups, one row twice."""
    random = np.random.default_rng(3)
    begin = [random.integers(1, 97, 200).tolist() for _ in range(2)]
    rows = {}
    for row, (group, answer) in enumerate([(0, 150), (0, 90), (1, 40), (0, 1), (1, 130)]):
        tokens = begin[group] + random.integers(1, 97, answer).tolist()
        rows[row] = trajectory(tokens, [0] * 200 + [1] * answer)
    rows[5] = rows[0]
    return collate(list(rows), rows, tiny_world.VOCABULARY, trees)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_models_gradients_by_flex_attention_are_those_of_rows(
    tmp_path, monkeypatch, checkpointing
):
    policy = model.load(tiny_world.save_model(tmp_path), torch.float32, checkpointing).train()
    policy.use_flex()
    seen = []

    def flex_attention(*args, **more):
        seen.append(1)
        return by_mask(*args, **more)

    monkeypatch.setattr(tree_attention, "flex_attention", flex_attention)
    plain = computed(policy, long_batch(trees=False))
    assert not seen, "rows must keep their causal kernel"
    shared = computed(policy, long_batch(trees=True))
    assert seen, "trees must not be dense"
    assert_alike(shared, plain, entropy_atol=1e-2)


def test_a_device_or_compiler_that_fails_is_told_and_one_that_errs_too(monkeypatch):
    gpu, form = torch.device("cuda"), (4, 2, 16, torch.bfloat16)
    assert "GPUs only" in tree_attention.why_not_flex(CPU, *form)
    for variable in tree_attention.OFF:
        monkeypatch.delenv(variable, raising=False)
    for variable in tree_attention.OFF:
        monkeypatch.setenv(variable, "1")
        assert f"{variable}=1" in tree_attention.why_not_flex(gpu, *form)
        monkeypatch.delenv(variable)

    def broken(*_):
        raise RuntimeError("Cannot find a working triton installation\nmore")

    monkeypatch.setattr(tree_attention, "difference", broken)
    expected = "flex attention fails: RuntimeError: Cannot find a working triton installation"
    assert tree_attention.why_not_flex(gpu, *form) == expected
    for found, words in ((0.5, "off by 0.5"), (float("nan"), "off by nan"), (0.001, "")):
        monkeypatch.setattr(tree_attention, "difference", lambda *_, found=found: found)
        why = tree_attention.why_not_flex(gpu, *form)
        assert words in why and bool(why) == bool(words)


def test_pairs_are_counted_as_the_tree_has_them():
    rows, _ = tiny_world.make_batch(seed=1)
    tokens = [unpack_tokens(t.tokens) for t in rows.values()]
    packing = batching.Shared(tokens)
    for group in (packing.order, packing.order[::2], packing.order[:1]):
        tree = packed([tokens[row] for row in group])
        assert packing.pairs(group, dense=True) == len(tree.tokens) ** 2
        found = packing.pairs(group, dense=False)
        assert found == int(tree.attention().sum()) + batching.PARTLY * len(tree.tokens)


@pytest.mark.parametrize("recomputed", [False, True])
def test_costs_are_measured_and_the_random_numbers_stay_what_they_were(recomputed):
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    found = costs.measure(SHAPE, torch.float32, CPU, 512, flex=False, recomputed=recomputed)
    assert torch.equal(torch.rand(3), expected)
    assert found.dense and min(found.token, found.causal, found.tree) > 0


@pytest.mark.parametrize("tokens, padded", [(7, 7), (8, 8), (9, 12), (13, 16)])
def test_long_rows_are_padded_for_cudnn_and_compute_the_same(tmp_path, monkeypatch, tokens, padded):
    monkeypatch.setattr(tree_attention, "LONG", 8)
    monkeypatch.setattr(tree_attention, "MULTIPLE", 4)
    policy = model.load(tiny_world.save_model(tmp_path), torch.float32, False)
    policy.use_own_attention()
    inputs = torch.randint(1, tiny_world.VOCABULARY, (2, tokens))
    exact = policy(inputs, inputs, torch.ones(inputs.shape))
    lengths = []
    policy.hf.base_model.layers[0].register_forward_pre_hook(
        lambda _, args: lengths.append(args[0].shape[1])
    )
    monkeypatch.setattr(tree_attention, "_kernels", [])
    tree_attention.use_cudnn(True)
    found = policy(inputs, inputs, torch.ones(inputs.shape))
    assert lengths == [padded]
    torch.testing.assert_close(found, exact)
    assert tree_attention.rounded(tokens, 3) % 3 == 0


def test_cudnns_attention_is_taken_only_where_it_computes_the_same(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    form = CPU, 4, 2, 8, torch.bfloat16
    assert not tree_attention.cudnn_works(*form), "a CPU has no cuDNN, whatever else would compute"
    # Another kernel stands for cuDNN's.
    monkeypatch.setattr(tree_attention, "IN_ORDER", tree_attention.IN_ORDER[-1:])
    assert tree_attention.cudnn_works(*form)
    assert not tree_attention.cudnn_works(*form[:-1], torch.float32)
    right = tree_attention.sdpa_attention_forward

    def wrong(module, query, *rest, **more):
        out, _ = right(module, query, *rest, **more)
        return (1.1 if tree_attention._kernels else 1.0) * out, None

    def fails(*_, **__):
        raise RuntimeError("cuDNN has no plan")

    for other in (wrong, fails):
        monkeypatch.setattr(tree_attention, "sdpa_attention_forward", other)
        assert not tree_attention.cudnn_works(*form) and not tree_attention._kernels
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert not tree_attention.cudnn_works(*form)
