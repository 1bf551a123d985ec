"""The plan of micro-batches: complete, within the limit, equal in number and balanced over
ranks."""

import random

import numpy as np
import pytest

from rose import protocol as p
from rose.config import ModelShape
from rose.trainer import batching
from rose.trainer.batching import Padded, Shared, flops, plan_batch, plan_micro_batches, size_of
from tests.made import trajectory


def lengths_like_rollouts(n, seed):
    return [random.Random(seed + i).randint(20, 768) for i in range(n)]


def micro_batches_of(plan):
    return [m for rank in plan for update in rank for m in update]


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("updates", [1, 2, 4])
@pytest.mark.parametrize("limit", [768, 2000, 8192])
def test_every_row_once_and_as_many_micro_batches_on_every_rank(ranks, updates, limit):
    lengths = lengths_like_rollouts(64, seed=ranks * 100 + updates)
    plan = plan_micro_batches(Padded(lengths), ranks, limit, updates)
    micro_batches = micro_batches_of(plan)
    assert sorted(row for m in micro_batches for row in m) == list(range(64))
    assert max(size_of(m, Padded(lengths)) for m in micro_batches) <= limit
    assert len(plan) == ranks and all(len(rank) == updates for rank in plan)
    for update in range(updates):
        assert len({len(rank[update]) for rank in plan}) == 1
    assert plan == plan_micro_batches(Padded(lengths), ranks, limit, updates)


def test_work_is_balanced_over_ranks_and_updates():
    lengths = lengths_like_rollouts(256, seed=7)
    plan = plan_micro_batches(Padded(lengths), 4, 4096, 2)
    work = [[sum(size_of(m, Padded(lengths)) for m in update) for update in rank] for rank in plan]
    for update in zip(*work, strict=False):
        assert max(update) <= 1.1 * min(update)
    per_update = [sum(update) for update in zip(*work, strict=False)]
    assert max(per_update) <= 1.05 * min(per_update)


def test_padding_is_small_when_lengths_vary():
    lengths = lengths_like_rollouts(128, seed=3)
    plan = plan_micro_batches(Padded(lengths), 2, 4096, 1)
    padded = sum(size_of(m, Padded(lengths)) for m in micro_batches_of(plan))
    assert padded < 1.15 * sum(lengths)


def test_a_rank_without_enough_rows_gets_an_empty_micro_batch():
    plan = plan_micro_batches(Padded([100] * 3), 2, 100, 1)
    assert sorted(len(m) for m in micro_batches_of(plan)) == [0, 1, 1, 1]
    assert all(len(rank[0]) == 2 and any(rank[0]) for rank in plan)


@pytest.mark.parametrize(
    "lengths, ranks, updates, words",
    [
        ([5, 100, 101], 1, 1, "row 2 has 101 tokens.*trainer.micro_batch_tokens=100"),
        ([5, 5, 5], 2, 2, "3 trajectories.*each of 2 trainer"),
    ],
)
def test_what_cannot_be_planned_is_named(lengths, ranks, updates, words):
    with pytest.raises(ValueError, match=words):
        plan_micro_batches(Padded(lengths), ranks, 100, updates)


SIZES = {"layers": 30, "hidden": 576, "intermediate": 1536, "heads": 9, "kv_heads": 3}
SMALL_MODEL = ModelShape(**SIZES, head_dim=64, vocab=49152, tied_embeddings=True)


def rows_like_a_batch(groups, size, system, prompt, answer, seed=0):
    """Token rows: all begin with `system` tokens, those of a group go on with the same `prompt`
    tokens."""
    draw = np.random.default_rng(seed)
    begin = draw.integers(0, 1000, system)
    rows = []
    for _ in range(groups):
        asked = draw.integers(0, 1000, prompt)
        rows += [[*begin, *asked, *draw.integers(0, 1000, answer)] for _ in range(size)]
    return [np.array(rows[i], np.int32) for i in draw.permutation(len(rows))]


def distinct_prefixes(rows):
    return len({row[:n].tobytes() for row in rows for n in range(1, len(row) + 1)})


@pytest.mark.parametrize(
    ("ranks", "updates", "limit"), [(1, 1, 10_000), (1, 1, 300), (2, 2, 400), (3, 1, 250)]
)
def test_shared_micro_batches_count_distinct_prefixes_and_keep_the_limit(ranks, updates, limit):
    rows = rows_like_a_batch(groups=4, size=8, system=60, prompt=20, answer=40)
    packing = Shared(rows)
    plan = plan_micro_batches(packing, ranks, limit, updates)
    micro_batches = micro_batches_of(plan)
    assert sorted(row for m in micro_batches for row in m) == list(range(32))
    for m in micro_batches:
        assert size_of(m, packing) == distinct_prefixes([rows[row] for row in m]) <= limit


def test_trees_are_taken_where_they_save_and_only_there():
    alike = rows_like_a_batch(groups=4, size=4, system=450, prompt=20, answer=70)
    unlike = rows_like_a_batch(groups=8, size=2, system=2, prompt=100, answer=400)
    assert plan_batch(alike, 1, 12_000, 1, flops(SMALL_MODEL))[1]
    assert not plan_batch(unlike, 1, 12_000, 1, flops(SMALL_MODEL))[1]
    assert not plan_batch(alike, 1, 12_000, 1, None)[1]


def of_tokens(count: int) -> p.Trajectory:
    return trajectory("g0.0", *[[0] * count] * 4)


def test_large_batches_are_cut_and_small_ones_are_not(monkeypatch):
    monkeypatch.setattr(batching, "PART_BYTES", 13 * 100)
    rows = [of_tokens(60), of_tokens(30), of_tokens(60), of_tokens(200), of_tokens(5)]
    summary = p.BatchSummary([0.0] * 5, [0] * 5, [0] * 5, [False] * 5)
    step, *parts = batching.train_messages(7, summary, [[[0, 1], [2]], [[3, 4]]], True, rows)
    expected = (7, [[[0, 1], [2]], [[3, 4]]], len(parts), True)
    assert (step.step, step.micro_batches, step.parts, step.trees) == expected
    assert [part.indices for part in parts] == [[0, 1], [2], [3], [4]]
    assert [part.part for part in parts] == [0, 1, 2, 3]
    assert all(part.trajectories == [rows[i] for i in part.indices] for part in parts)


def test_a_rank_without_rows_still_hears_of_the_step():
    summary = p.BatchSummary([0.0], [0], [0], [False])
    step, part = batching.train_messages(1, summary, [[[]]], False, [of_tokens(3)])
    assert step.parts == 1 and part.indices == [] and part.trajectories == []
