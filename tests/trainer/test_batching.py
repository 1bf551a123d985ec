"""The plan of micro-batches: complete, within the limit, equal in number and balanced over ranks."""

import random

import pytest

from rose.trainer.batching import padded_tokens, plan_micro_batches


def lengths_like_rollouts(n, seed):
    return [random.Random(seed + i).randint(20, 768) for i in range(n)]


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("updates", [1, 2, 4])
@pytest.mark.parametrize("limit", [768, 2000, 8192])
def test_every_row_once_within_the_limit_and_as_many_micro_batches_on_every_rank(ranks, updates, limit):
    lengths = lengths_like_rollouts(64, seed=ranks * 100 + updates)
    plan = plan_micro_batches(lengths, ranks, limit, updates)
    micro_batches = [m for rank in plan for update in rank for m in update]
    assert sorted(row for m in micro_batches for row in m) == list(range(64))
    assert max(padded_tokens(m, lengths) for m in micro_batches) <= limit
    assert len(plan) == ranks and all(len(rank) == updates for rank in plan)
    for update in range(updates):
        assert len({len(rank[update]) for rank in plan}) == 1
    assert plan == plan_micro_batches(lengths, ranks, limit, updates)


def test_work_is_balanced_over_ranks_and_updates():
    lengths = lengths_like_rollouts(256, seed=7)
    plan = plan_micro_batches(lengths, 4, 4096, 2)
    work = [[sum(padded_tokens(m, lengths) for m in update) for update in rank] for rank in plan]
    for update in zip(*work):
        assert max(update) <= 1.1 * min(update)
    per_update = [sum(update) for update in zip(*work)]
    assert max(per_update) <= 1.05 * min(per_update)


def test_padding_is_small_when_lengths_vary():
    lengths = lengths_like_rollouts(128, seed=3)
    plan = plan_micro_batches(lengths, 2, 4096, 1)
    padded = sum(padded_tokens(m, lengths) for rank in plan for update in rank for m in update)
    assert padded < 1.15 * sum(lengths)


def test_one_micro_batch_per_rank_when_the_limit_allows():
    plan = plan_micro_batches([10] * 8, 2, 10_000, 1)
    assert [len(rank[0]) for rank in plan] == [1, 1]
    assert [len(rank[0][0]) for rank in plan] == [4, 4]


def test_a_rank_without_enough_rows_gets_an_empty_micro_batch():
    plan = plan_micro_batches([100] * 3, 2, 100, 1)
    assert sorted(len(m) for rank in plan for m in rank[0]) == [0, 1, 1, 1]
    assert [len(rank[0]) for rank in plan] == [2, 2]
    assert all(any(rank[0]) for rank in plan)


def test_a_row_that_is_too_long_is_named():
    with pytest.raises(ValueError, match="row 2 has 101 tokens.*trainer.micro_batch_tokens=100"):
        plan_micro_batches([5, 100, 101], 1, 100, 1)


def test_too_few_rows_for_the_ranks_is_said():
    with pytest.raises(ValueError, match="3 trajectories.*trainer.ranks=2.*updates_per_step=2.*4 are needed"):
        plan_micro_batches([5, 5, 5], 2, 100, 2)
