"""turn_grpo against its formula in plain Python floats, over trajectories of different numbers of
turns; with one turn it is grpo, bit for bit."""

import math
import random
from dataclasses import replace

import pytest
import torch

from rose.trainer.algorithms import build
from rose.trainer.algorithms.base import Summary

GRPO = {"clip_low": 0.2, "clip_high": 0.3, "scale_by_std": True}
ARGS = GRPO | {"gamma": 1.0, "trajectory_weight": 0.5}

# Rewards of turns. Group 0: three turns, one, two, two; only one trajectory has a turn 2. Group 1:
# all equal. Group 2: equal in sum, not in turns. Group 3: one turn each.
TURNS = [[[0.5, 0.0, 1.0], [0.25], [0.0, -1.0], [0.0, 0.5]], [[0.1, 0.2], [0.1, 0.2]]]
TURNS += [[[0.0, 1.0], [1.0, 0.0]], [[2.0], [-1.0], [0.5]]]


def summary(groups):
    rows = [(turns, g) for g, group in enumerate(groups) for turns in group]
    padded = torch.full((len(rows), max(len(t) for t, _ in rows)), math.nan, dtype=torch.float64)
    for i, (turns, _) in enumerate(rows):
        padded[i, : len(turns)] = torch.tensor(turns, dtype=torch.float64)
    lists = zip(*((sum(turns), g, 2 * len(turns), False) for turns, g in rows), strict=True)
    return Summary(*map(torch.tensor, lists), padded)


def normalised(values, scale):
    """Each value's (x - mean) / sample standard deviation; 0 where there is nothing to compare."""
    mean = sum(values) / len(values)
    std = math.sqrt(sum((v - mean) ** 2 for v in values) / max(1, len(values) - 1))
    if std < 1e-9:
        return [0.0] * len(values)
    return [(v - mean) / (std if scale else 1.0) for v in values]


def expected(groups, gamma, weight, scale):
    """[trajectory][turn], of all groups one after the other."""
    found = []
    for group in groups:
        returns = [
            [sum(gamma**n * r for n, r in enumerate(turns[k:])) for k in range(len(turns))]
            for turns in group
        ]
        outcome = normalised([sum(turns) for turns in group], scale)
        of_turns = [[0.0] * len(turns) for turns in group]
        for k in range(max(map(len, group))):
            there = [i for i, turns in enumerate(group) if k < len(turns)]
            values = normalised([returns[i][k] for i in there], scale)
            for i, value in zip(there, values, strict=True):
                of_turns[i][k] = value
        for own, whole in zip(of_turns, outcome, strict=True):
            found.append([(1 - weight) * a + weight * whole for a in own])
    return found


def drawn(seed):
    draw = random.Random(seed)
    return [
        [[draw.choice([0, 0.25, -0.5, 1]) for _ in range(draw.randint(1, 6))] for _ in range(size)]
        for size in (4, 2, 8, 3)
    ]


@pytest.mark.parametrize("groups", [TURNS, *map(drawn, range(5))])
@pytest.mark.parametrize(
    "gamma, weight, scale",
    [(1.0, 0.5, True), (0.9, 0.25, True), (0.0, 0.0, False), (0.5, 1.0, False)],
)
def test_advantages_are_the_formulas(groups, gamma, weight, scale):
    args = ARGS | {"gamma": gamma, "trajectory_weight": weight, "scale_by_std": scale}
    found = build("turn_grpo", args).advantages(summary(groups))
    for row, own in zip(found, expected(groups, gamma, weight, scale), strict=True):
        assert row[: len(own)].tolist() == pytest.approx(own, rel=1e-4, abs=1e-5)
    assert found.isfinite().all()


def test_returns_that_differ_by_the_order_of_their_terms_are_equal():
    orders = [[0.1, 0.2, 0.3], [0.3, 0.2, 0.1], [0.2, 0.3, 0.1]]
    found = build("turn_grpo", ARGS | {"trajectory_weight": 0.0}).advantages(summary([orders]))
    assert found[:, 0].tolist() == [0, 0, 0] and found[:, 1].ne(0).any()


@pytest.mark.parametrize("weight", [0.0, 0.3, 0.5, 1.0])
@pytest.mark.parametrize("scale", [True, False])
def test_with_one_turn_it_is_grpo_bit_for_bit(weight, scale):
    torch.manual_seed(3)
    data = summary([[[draw.item()] for draw in torch.randn(8)] for _ in range(4)])
    grpo = build("grpo", GRPO | {"scale_by_std": scale})
    turn = build("turn_grpo", ARGS | {"scale_by_std": scale, "trajectory_weight": weight})
    plain, of_turns = grpo.advantages(data), turn.advantages(data)
    assert torch.equal(of_turns, plain[:, None])
    assert torch.equal(turn.token_weights(data), grpo.token_weights(data))


def test_a_batch_without_rewards_of_turns_is_refused():
    algorithm, data = build("turn_grpo", ARGS), summary(TURNS)
    missing = data.turn_rewards.clone()
    missing[3] = math.nan
    for rewards in (None, missing):
        with pytest.raises(ValueError, match="without rewards of turns"):
            algorithm.advantages(replace(data, turn_rewards=rewards))


def test_groups_of_which_nobody_spoke_are_taken_like_the_batch_that_they_come_in():
    algorithm, silent = build("turn_grpo", ARGS), summary([[[], []]])
    got = algorithm.advantages(replace(silent, rewards=silent.rewards.float(), turn_rewards=None))
    whole = algorithm.advantages(summary([[[], []], [[0.5, 1.0], [0.0, -1.0]]]))
    assert torch.equal(got, whole[:2, :1])


def test_a_trajectory_without_a_turn_has_nothing_to_train_and_spoils_nothing():
    got = build("turn_grpo", ARGS).advantages(summary([[[0.5, 1.0], [0.0, -1.0], []]]))
    assert got.isfinite().all() and got[0, 0] > 0 > got[1, 0]
