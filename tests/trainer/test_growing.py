"""Weights of a batch that grows: the whole batch's, up to a factor that is known at its end."""

import pytest
import torch

from rose.trainer.algorithms import algorithms, build
from rose.trainer.algorithms.base import Summary
from rose.trainer.growing import Growing
from tests.trainer.test_algorithms import ARGS

TOKENS = [3, 9, 0, 5, 6, 2, 7, 7]
TREE = {"clip_low": 0.2, "clip_high": 0.2, "scale_by_std": True}
TURNS = TREE | {"gamma": 0.9, "trajectory_weight": 0.5}
EVERY = ARGS | {"turn_grpo": TURNS, "tree_grpo": TREE}
FILTERS = ARGS["dapo"] | {"overlong_filtering": True}


def batch(rows, cut=0):
    """The first rows of four groups of two; the first `cut` rows are truncated."""
    rewards = torch.tensor([0.5, 1.0, 0.0, 2.0, 1.0, 0.0, 3.0, 1.0])[:rows]
    number, tokens = torch.arange(rows), torch.tensor(TOKENS[:rows])
    turns = torch.arange(2.0 * rows).view(rows, 2).double()
    return Summary(rewards, number // 2, tokens, number < cut, turns)


@pytest.mark.parametrize(
    ("name", "args", "cut"),
    [(name, args, 0) for name, args in EVERY.items() if name != "reinforce_pp"]
    + [("dapo", FILTERS, 3)],
)
def test_weights_times_the_scale_are_those_of_the_batch_at_once(name, args, cut):
    algorithm = build(name, args)
    assert not getattr(algorithm, "advantages_of_batch", False)
    growing, rounds = Growing(algorithm), [2, 4, 8]
    found = [growing.extend(batch(rows, cut)) for rows in rounds]
    advantages, weights = found[-1]
    whole = batch(8, cut)
    spoke = whole.response_tokens > 0
    assert torch.equal(advantages, algorithm.advantages(whole))
    expected = algorithm.token_weights(whole)[spoke]
    for rows, (_, given) in zip(rounds, found, strict=True):
        part = given[spoke[:rows]] * growing.scale
        torch.testing.assert_close(part, expected[: len(part)], rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("baseline", ["none", "group"])
def test_advantages_of_the_whole_batch_are_found_out(baseline):
    algorithm = build("reinforce_pp", ARGS["reinforce_pp"] | {"baseline": baseline})
    assert algorithm.advantages_of_batch
    growing = Growing(algorithm)
    growing.extend(batch(4))
    with pytest.raises(ValueError, match="the advantages of groups .* trainer.stream=false"):
        growing.extend(batch(8))


def test_weights_that_change_by_more_than_a_factor_are_found_out():
    class Longest(algorithms()["grpo"]):
        def token_weights(self, summary):
            longest = summary.response_tokens.max()
            return (summary.response_tokens / longest).pow(len(summary.rewards))

    growing = Growing(Longest(0.2, 0.2, True))
    growing.extend(batch(2))
    with pytest.raises(ValueError, match="the weights of groups"):
        growing.extend(batch(4))
