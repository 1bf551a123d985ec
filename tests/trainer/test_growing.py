"""Refusals of a batch that grows (test_stream.py has what it trains)."""

import pytest
import torch

from rose.trainer.algorithms import ALGORITHMS, build
from rose.trainer.algorithms.base import Summary
from rose.trainer.growing import Growing
from tests.trainer.test_algorithms import ARGS

TOKENS = [3, 9, 0, 5, 6, 2, 7, 7]


def batch(rows):
    """Return the first rows of four groups of two."""
    rewards = torch.tensor([0.5, 1.0, 0.0, 2.0, 1.0, 0.0, 3.0, 1.0])[:rows]
    number, tokens = torch.arange(rows), torch.tensor(TOKENS[:rows])
    return Summary(rewards, number // 2, tokens, number < 0)


@pytest.mark.parametrize("baseline", ["none", "group"])
def test_advantages_of_the_whole_batch_are_found_out(baseline):
    algorithm = build("reinforce_pp", ARGS["reinforce_pp"] | {"baseline": baseline})
    assert algorithm.advantages_of_batch
    growing = Growing(algorithm)
    growing.extend(batch(4))
    with pytest.raises(ValueError, match="the advantages of groups .* trainer.stream=false"):
        growing.extend(batch(8))


def test_weights_that_change_by_more_than_a_factor_are_found_out():
    class Longest(ALGORITHMS["grpo"]):
        def token_weights(self, summary):
            longest = summary.response_tokens.max()
            return (summary.response_tokens / longest).pow(len(summary.rewards))

    growing = Growing(Longest(0.2, 0.2, True))
    growing.extend(batch(2))
    with pytest.raises(ValueError, match="the weights of groups"):
        growing.extend(batch(4))
