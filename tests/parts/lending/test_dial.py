"""Sharing steps of the online engine: how often rollouts may run beside them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose.parts.lending.config import Slo
from rose.parts.lending.rules.dial import KEPT_OWED, MOST_OWED, PACE, Dial
from rose.parts.lending.rules.predictor import Work

STEP_S = 0.01
DECODES = Work((), 4, 400)
FOREVER = float("inf")


def slo(pace: float) -> Slo:
    """Targets of which the median time per output token is `pace` times that of a step alone."""
    return Slo(ttft_p50_s=0.2, ttft_p99_s=0.5, tpot_p50_s=pace * STEP_S, tpot_p99_s=1.0)


def shared(dial: Dial, steps: int, slower: float = 2.0) -> tuple[float, float]:
    """Return the share of steps beside which rollouts ran, and the mean time of a step."""
    lets, seconds = 0, 0.0
    for _ in range(steps):
        let = dial.lets(DECODES, STEP_S, FOREVER)
        took = STEP_S * (slower if let else 1.0)
        dial.decoded(took)
        lets, seconds = lets + let, seconds + took
    return lets / steps, seconds / steps


@pytest.mark.parametrize("pace, least", [(1.02, 0.0), (1.1, 0.06), (1.25, 0.2), (2.2, 0.99)])
def test_looser_targets_let_more_steps_be_shared_and_the_mean_step_meets_the_target(pace, least):
    share, mean = shared(Dial(slo(pace), 0.5, 0.5), 2000)
    assert share >= least and (share == 0) == (pace == 1.02)
    assert mean <= max(STEP_S, PACE * pace * STEP_S) * 1.001


@given(st.floats(0.5, 4.0), st.floats(0.0, 1.0), st.floats(1.0, 30.0))
def test_the_mean_step_meets_the_target_though_steps_take_longer(pace, hold, slower):
    _, mean = shared(Dial(slo(pace), hold, hold), 3000, slower)
    # One step more than was saved may be shared.
    assert mean <= max(STEP_S, PACE * pace * STEP_S) + slower * STEP_S / 3000 + 1e-9


def test_steps_with_prompts_and_steps_without_time_left_are_not_shared():
    dial = Dial(slo(3.0), 0.5, 0.5)
    shared(dial, 10)
    assert dial.lets(DECODES, STEP_S, 2 * STEP_S) and not dial.lets(DECODES, STEP_S, 1.9 * STEP_S)
    assert not dial.lets(Work(((8, 0),), 4, 400), STEP_S, FOREVER)
    assert not dial.lets(DECODES, 0.0, FOREVER)


def test_without_targets_no_step_is_shared():
    dial = Dial(None, 0.5, 0.5)
    assert shared(dial, 10)[0] == 0


def test_most_of_a_slow_phase_is_forgotten_when_no_request_is_left_that_suffered_from_it():
    dial = Dial(slo(3.0), 0.5, 0.5)
    dial.decoded(100.0)
    assert dial.saved == pytest.approx(-MOST_OWED * 3.0 * STEP_S)
    assert not dial.lets(DECODES, STEP_S, FOREVER)
    dial.idle()
    assert dial.saved == pytest.approx(-KEPT_OWED * 3.0 * STEP_S)
    for _ in range(10):
        dial.decoded(STEP_S)
    assert dial.lets(DECODES, STEP_S, FOREVER)
    dial.idle()
    assert dial.saved == 0, "time that was saved for others is nobody's"


@pytest.mark.parametrize("tokens", [3, 6, 24])
def test_short_answers_meet_the_target_though_shared_steps_take_longer_than_expected(tokens):
    dial, seconds, answers = Dial(slo(1.25), 0.1, 0.1), 0.0, 200
    for _ in range(answers):
        seconds += tokens * shared(dial, tokens, slower=3.0)[1]
        dial.idle()
    assert seconds / (answers * tokens) <= PACE * 1.25 * STEP_S * 1.01
