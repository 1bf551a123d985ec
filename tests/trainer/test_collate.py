"""Trajectories become tensors in which position t is about the token that t + 1 inputs predict."""

import msgspec
import numpy as np
import pytest

from rose import protocol as p
from rose.trainer.collate import collate
from tests.made import trajectory as drawn


def trajectory(tokens, mask, logprobs=None):
    logprobs = logprobs if logprobs is not None else [-0.5 * m for m in mask]
    return drawn("g0.0", tokens, mask, logprobs, [3 if m else -1 for m in mask])


def test_shift_and_right_padding():
    rows = {4: trajectory([5, 6, 7, 8], [0, 0, 1, 1], [0, 0, -1.0, -2.0])}
    rows[9] = trajectory([1, 2], [0, 1])
    batch = collate([4, 9], rows, vocabulary=10)
    assert batch.rows.tolist() == [4, 9]
    assert batch.inputs.tolist() == [[5, 6, 7], [1, 2, 0]]
    assert batch.targets.tolist() == [[6, 7, 8], [2, 0, 0]]
    assert batch.mask.tolist() == [[0, 1, 1], [1, 0, 0]]
    assert batch.behaviour.tolist() == [[0, -1, -2], [-0.5, 0, 0]]
    assert batch.versions.tolist() == [[-1, 3, 3], [3, -1, -1]]


def test_no_rows_give_one_row_with_nothing_to_learn():
    batch = collate([], {}, vocabulary=10)
    assert batch.inputs.shape == (1, 1) and batch.mask.sum() == 0 and len(batch.rows) == 0


def test_what_the_engine_says_of_others_tokens_is_ignored():
    rows = {0: trajectory([1, 2, 3], [0, 0, 1], [np.nan, -np.inf, -1.0])}
    batch = collate([0], rows, vocabulary=10)
    assert batch.behaviour.tolist() == [[0, -1]]


TURNS = "its turns .* 2 response tokens"


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (dict(tokens=p.pack_tokens([1, 2])), "must be equally many"),
        (dict(tokens=p.pack_tokens([1, 2, 10])), "the model has 0 to 9"),
        (dict(tokens=p.pack_tokens([1, -2, 3])), "the model has 0 to 9"),
        (dict(response_tokens=1), "they must agree"),
        (dict(logprobs=p.pack_floats([0, 0, np.nan])), "not finite"),
        (dict(mask=b"\1\1\0"), "the first token is always the prompt's"),
        (dict(turn_tokens=[(0, 1)]), TURNS),
        (dict(turn_tokens=[(0, 1), (1, 1)]), TURNS),
        (dict(turn_tokens=[(-1, 2)]), TURNS),
        (dict(turn_rewards=[0.5]), TURNS),
    ],
)
def test_a_trajectory_that_contradicts_itself_is_named(bad, words):
    wrong = msgspec.structs.replace(trajectory([1, 2, 3], [0, 1, 1]), **bad)
    with pytest.raises(ValueError, match=f"trajectory g0.0: .*{words}"):
        collate([0], {0: wrong}, vocabulary=10)
