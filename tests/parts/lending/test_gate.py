"""The gate: no step of rollouts that could make an online request late, and none when in doubt."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rose.parts.lending.board import Control, Online
from rose.parts.lending.rules.gate import CONTROL_STALE_S, Gate, Reason, part
from rose.parts.lending.rules.predictor import Work
from tests.parts.lending.conftest import SLO, lent_by, profile_of

NOW = 1000.0
NAN = math.nan
DEMAND = Work(((5000, 0),), 8, 8000)


@pytest.fixture
def gate():
    return Gate(lent_by(), SLO, profile_of())


def admit(gate, demand=DEMAND, ahead=(0.0, 0.0), **state):
    """(tokens, reason), when both boards, with this state, were written just now."""
    of_control = {name: state.pop(name) for name in ("lend", "share", "stops") if name in state}
    online, control = Online(beat=NOW, **state), Control(**dict(beat=NOW, lend=1.0) | of_control)
    return gate.admit(NOW, online, control, demand, ahead)


def test_beside_an_idle_engine_a_whole_chunk_goes_but_no_more_than_there_is_to_do(gate):
    assert admit(gate) == (512, Reason.OPEN)
    assert admit(gate, Work((), 3, 300)) == (3, Reason.OPEN)
    assert admit(gate, Work((), 0, 0)) == (1, Reason.OPEN)


def test_a_step_with_stops_holds_up_for_a_part_of_its_time(predictor):
    gate = Gate(lent_by(), SLO, profile_of(), parts=10)
    until = NOW + 0.02 * predictor.p99(part(DEMAND, 300)) + 1e-6
    assert admit(gate, running=1, hold_until=until) == (300, Reason.OPEN)
    assert admit(gate, running=1, hold_until=until, stops=0)[0] < 300


def test_it_is_held_up_for_less_of_it_where_that_keeps_the_median(gate, predictor):
    part_of = (0.2 * predictor.seconds(part(DEMAND, 300)) + 1e-6) / (0.1 * 1.0)
    assert admit(gate, prompt_share=part_of) == (300, Reason.OPEN)
    assert admit(gate, prompt_share=1e-3) == (0, Reason.STEP_SHARE)


@pytest.mark.parametrize(
    "of_online, of_control, reason",
    [
        (None, {}, Reason.ONLINE_SILENT),
        ({}, None, Reason.CONTROL_SILENT),
        (dict(beat=NOW - 0.3), {}, Reason.ONLINE_SILENT),
        (dict(beat=NOW + 5), {}, Reason.ONLINE_SILENT),
        (dict(beat=NAN), {}, Reason.ONLINE_SILENT),
        (dict(hold_until=NAN), {}, Reason.SLACK),
        (dict(decode_s=NAN), {}, Reason.PACE),
        (dict(prompt_share=NAN), {}, Reason.STEP_SHARE),
        (dict(lends=0), {}, Reason.ONLINE_REFUSES),
        ({}, dict(lend=0.0), Reason.STOPPED),
        ({}, dict(share=0.0), Reason.HOUR),
        ({}, dict(lend=NAN), Reason.STOPPED),
        ({}, dict(beat=NOW - CONTROL_STALE_S - 1), Reason.CONTROL_SILENT),
    ],
)
def test_what_shuts_it(gate, of_online, of_control, reason):
    online = None if of_online is None else Online(**dict(beat=NOW) | of_online)
    control = None if of_control is None else Control(**dict(beat=NOW, lend=1.0) | of_control)
    assert gate.admit(NOW, online, control, DEMAND) == (0, reason)


def test_without_profile_or_targets_nothing_is_lent_and_a_profile_that_is_none_is_refused():
    assert admit(Gate(lent_by(), SLO, None)) == (0, Reason.NO_PROFILE)
    assert admit(Gate(lent_by(), None, profile_of())) == (0, Reason.NO_SLO)
    damaged = [{"interference": each} for each in (None, {}, {"hold_p99": NAN}, {"hold_p99": -1})]
    damaged = [profile_of() | each for each in (*damaged, {"rollout": {"predictor": {}}})]
    for broken in ({}, *damaged):
        with pytest.raises(ValueError):
            Gate(lent_by(), SLO, broken)


chunks = st.lists(st.tuples(st.integers(1, 3000), st.integers(0, 5000)), max_size=4)


@settings(deadline=None)
@given(
    chunks,
    st.integers(0, 100),
    st.integers(0, 100_000),
    st.floats(-1, 3),
    st.floats(0, 3),
    st.floats(0.001, 1),
    st.integers(1, 4000),
    st.lists(st.floats(0.01, 10), max_size=20),
)
def test_an_admitted_step_is_the_largest_that_holds_up_the_online_engine_within_its_slack(
    prompts, decodes, context, slack, hold, share, chunk, observed
):
    profile = profile_of() | {"interference": {"hold_p99": hold, "hold_mean": 0.0}}
    gate = Gate(lent_by(chunk_tokens=chunk, step_share=share), SLO, profile)
    for at, seconds in enumerate(observed):  # the two kinds of steps drift apart
        gate.predictor.observe(Work(((100, 0),), 0, 0) if at % 3 else Work((), 1, 100), seconds)
    demand = Work(tuple(prompts), decodes, context)
    online = Online(beat=NOW, running=1, hold_until=NOW + slack)
    tokens, reason = gate.admit(NOW, online, Control(beat=NOW, lend=1), demand)
    most = min(chunk, max(1, demand.tokens))
    assert (tokens > 0) == (reason == Reason.OPEN) and tokens <= most

    def fits(count):
        work = part(demand, count) if demand.tokens else Work((), 1, 0)
        in_time = hold * gate.predictor.p99(work) <= online.hold_until - NOW
        return in_time and hold * gate.predictor.seconds(work) <= share * 1.0

    assert not tokens or fits(tokens)
    assert tokens == most or not fits(tokens + 1)


@settings(deadline=None)
@given(chunks, st.integers(0, 100), st.integers(0, 100_000), st.integers(0, 20_000))
def test_a_part_has_so_many_tokens_and_all_are_the_wholes(prompts, decodes, context, tokens):
    whole = Work(tuple(prompts), decodes, context)
    cut = part(whole, tokens)
    assert cut.tokens == min(tokens, whole.tokens)
    assert cut.decodes <= decodes and cut.decode_context <= context
    assert len(cut.prefill) <= len(prompts)


def test_nothing_begins_beside_decodes_that_would_miss_their_median_target(gate):
    """Beside rollouts, which hold up by 0.1, a decode step of 91 ms takes 101 of 100 ms."""
    for seconds, reason in ((0.0, Reason.OPEN), (0.089, Reason.OPEN), (0.091, Reason.PACE)):
        assert admit(gate, Work((), 4, 400), decode_s=seconds).reason is reason


def test_what_is_left_of_steps_before_is_part_of_the_next_ones():
    gate, one = Gate(lent_by(step_share=0.5), SLO, profile_of(0.5)), Work((), 1, 10)
    p99, mean = gate.predictor.p99(one), gate.predictor.seconds(one)
    until = NOW + 0.5 * (p99 + 0.03) + 1e-6
    assert admit(gate, one, (0.02, 0.03), hold_until=until).tokens == 1
    assert admit(gate, one, (0.02, 0.031), hold_until=until).reason is Reason.SLACK
    left = SLO.ttft_p99_s - mean  # step_share is 0.5, of which a step takes h = 0.5 of its time
    assert admit(gate, one, (left - 1e-6, 0.0)).tokens == 1
    assert admit(gate, one, (left + 1e-6, 0.0)).reason is Reason.STEP_SHARE
