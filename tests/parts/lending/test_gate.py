"""The gate: no step of rollouts that could make an online request late, and nothing at all when in
doubt."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rose.parts.lending.board import Control, Online
from rose.parts.lending.config import Lending, Slo
from rose.parts.lending.rules.gate import CONTROL_STALE_S, Gate, Reason, part
from rose.parts.lending.rules.predictor import Predictor, Work

NOW = 1000.0
DEMAND = Work(((5000, 0),), 8, 8000)


@pytest.fixture
def gate(lending, slo, profile):
    return Gate(lending(), slo, profile())


def test_beside_an_idle_engine_a_whole_chunk_goes(gate, online, control):
    assert gate.admit(NOW, online(NOW), control(NOW), DEMAND) == (512, Reason.OPEN)


def test_a_step_that_can_be_stopped_between_layers_holds_up_only_for_a_part_of_its_time(
    lending, slo, profile, online, control, predictor
):
    gate = Gate(lending(), slo, profile(), parts=10)
    step = 0.02 * predictor.p99(part(DEMAND, 300)) + 1e-6
    board = online(NOW, running=1, hold_until=NOW + step)
    assert gate.admit(NOW, board, control(NOW), DEMAND) == (300, Reason.OPEN)
    assert gate.admit(NOW, board, control(NOW, stops=0), DEMAND)[0] < 300


def test_no_more_than_there_is_to_do(gate, online, control):
    assert gate.admit(NOW, online(NOW), control(NOW), Work((), 3, 300)) == (3, Reason.OPEN)
    assert gate.admit(NOW, online(NOW), control(NOW), Work((), 0, 0)) == (1, Reason.OPEN)


def test_slack_makes_the_chunk_smaller_then_shuts(gate, online, control, predictor):
    step = 0.2 * predictor.p99(part(DEMAND, 300)) + 1e-6
    found = gate.admit(NOW, online(NOW, running=1, hold_until=NOW + step), control(NOW), DEMAND)
    assert found == (300, Reason.OPEN)
    assert gate.admit(NOW, online(NOW, running=1, hold_until=NOW + 1e-3), control(NOW), DEMAND) == (
        0,
        Reason.SLACK,
    )
    assert gate.admit(NOW, online(NOW, running=1, hold_until=NOW - 5), control(NOW), DEMAND) == (
        0,
        Reason.SLACK,
    )


def test_a_request_to_come_is_held_up_no_longer_than_its_share(
    lending, slo, profile, online, control
):
    gate = Gate(lending(step_share=0.001), slo, profile())
    assert gate.admit(NOW, online(NOW), control(NOW), DEMAND) == (0, Reason.STEP_SHARE)


def test_it_is_held_up_for_less_of_it_where_that_keeps_the_median(gate, online, control, predictor):
    part_of = (0.2 * predictor.seconds(part(DEMAND, 300)) + 1e-6) / (0.1 * 1.0)
    assert gate.admit(NOW, online(NOW, prompt_share=part_of), control(NOW), DEMAND) == (
        300,
        Reason.OPEN,
    )
    assert gate.admit(NOW, online(NOW, prompt_share=1e-3), control(NOW), DEMAND) == (
        0,
        Reason.STEP_SHARE,
    )


@pytest.mark.parametrize(
    "state, reason",
    [
        (dict(online=None), Reason.ONLINE_SILENT),
        (dict(control=None), Reason.CONTROL_SILENT),
        (dict(beat=NOW - 0.3), Reason.ONLINE_SILENT),
        (dict(beat=NOW + 5), Reason.ONLINE_SILENT),
        (dict(beat=math.nan), Reason.ONLINE_SILENT),
        (dict(hold_until=math.nan), Reason.SLACK),
        (dict(decode_s=math.nan), Reason.PACE),
        (dict(prompt_share=math.nan), Reason.STEP_SHARE),
        (dict(lends=0), Reason.ONLINE_REFUSES),
        (dict(lend=0.0), Reason.STOPPED),
        (dict(share=0.0), Reason.HOUR),
        (dict(lend=math.nan), Reason.STOPPED),
        (dict(control_beat=NOW - CONTROL_STALE_S - 1), Reason.CONTROL_SILENT),
    ],
)
def test_what_shuts_it(gate, online, control, state, reason):
    of_online, of_control = (
        {k: v for k, v in state.items() if k in names}
        for names in (("hold_until", "decode_s", "prompt_share", "lends"), ("lend", "share"))
    )
    board = None if "online" in state else online(NOW, **of_online)
    word = None if "control" in state else control(NOW, **of_control)
    if "beat" in state:
        board.beat = state["beat"]
    if "control_beat" in state:
        word.beat = state["control_beat"]
    assert gate.admit(NOW, board, word, DEMAND) == (0, reason)


def test_without_profile_or_targets_nothing_is_lent(lending, slo, profile, online, control):
    assert Gate(lending(), slo, None).admit(NOW, online(NOW), control(NOW), DEMAND) == (
        0,
        Reason.NO_PROFILE,
    )
    assert Gate(lending(), None, profile()).admit(NOW, online(NOW), control(NOW), DEMAND) == (
        0,
        Reason.NO_SLO,
    )


@pytest.mark.parametrize(
    "broken",
    [
        {},
        {"rollout": {"predictor": {}}},
        {"interference": None},
        {"interference": {}},
        {"interference": {"hold_p99": math.nan}},
        {"interference": {"hold_p99": -1}},
    ],
)
def test_a_profile_that_is_none_is_refused(lending, slo, profile, broken):
    with pytest.raises(ValueError):
        Gate(lending(), slo, profile() | broken if broken else {})


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
def test_no_admitted_step_can_hold_up_the_online_engine_beyond_its_slack(
    prompts, decodes, context, slack, hold, share, chunk, observed
):
    lending = Lending(
        profile=None,
        chunk_tokens=chunk,
        step_share=share,
        priority="idle",
        stops="layer",
        kv_gib=None,
        reserve=0.1,
        high_watermark=0.9,
        stale_after_s=0.25,
        revoke_after_s=2.0,
        patience_s=5.0,
        hours={},
        control_port=0,
        stop_file=None,
    )
    predictor = Predictor((0.02, 2e-4, 1e-7, 1e-3, 2e-6))
    gate = Gate(
        lending,
        Slo(0.5, 1.0, 0.1, 0.2),
        {
            "rollout": {"predictor": predictor.to_dict()},
            "interference": {"hold_p99": hold, "hold_mean": 0.0},
        },
    )
    for at, seconds in enumerate(observed):  # the two kinds of steps drift apart
        gate.predictor.observe(Work(((100, 0),), 0, 0) if at % 3 else Work((), 1, 100), seconds)
    demand = Work(tuple(prompts), decodes, context)
    online = Online(beat=NOW, running=1, hold_until=NOW + slack)
    tokens, reason = gate.admit(NOW, online, Control(beat=NOW, lend=1), demand)
    assert (tokens > 0) == (reason == Reason.OPEN) and tokens <= min(chunk, max(1, demand.tokens))
    if tokens:
        work = part(demand, tokens) if demand.tokens else Work((), 1, 0)
        assert hold * gate.predictor.p99(work) <= online.hold_until - NOW
        assert hold * gate.predictor.seconds(work) <= share * 1.0


@settings(deadline=None)
@given(chunks, st.integers(0, 100), st.integers(0, 100_000), st.integers(0, 20_000))
def test_a_part_has_so_many_tokens_and_none_that_the_whole_has_not(
    prompts, decodes, context, tokens
):
    whole = Work(tuple(prompts), decodes, context)
    cut = part(whole, tokens)
    assert cut.tokens == min(tokens, whole.tokens)
    assert cut.decodes <= decodes
    assert cut.decode_context <= context
    assert len(cut.prefill) <= len(prompts)


def test_nothing_begins_beside_decodes_that_would_miss_their_median_target(
    lending, slo, profile, online, control
):
    """hold 0.2, 0.1 on average: a decode step of 91 ms takes 101 ms beside R; tpot_p50_s is 100
    ms."""
    gate = Gate(lending(), slo, profile(0.2))

    def ask(seconds):
        return gate.admit(
            10.0, online(10.0, decode_s=seconds), control(10.0), Work((), 4, 400)
        ).reason

    assert ask(0.0) is Reason.OPEN and ask(0.089) is Reason.OPEN and ask(0.091) is Reason.PACE


def test_what_is_left_of_the_steps_let_through_before_is_part_of_the_next_ones(
    lending, slo, profile, online, control
):
    from rose.parts.lending.rules.gate import Gate
    from rose.parts.lending.rules.predictor import Work

    gate, now, one = Gate(lending(step_share=0.5), slo, profile(hold=0.5)), 100.0, Work((), 1, 10)
    p99, mean = gate.predictor.p99(one), gate.predictor.seconds(one)
    slack = 0.5 * (p99 + 0.03) + 1e-6
    board, told = online(now, hold_until=now + slack), control(now)
    assert gate.admit(now, board, told, one, (0.02, 0.03)).tokens == 1
    assert gate.admit(now, board, told, one, (0.02, 0.031)).reason.name == "SLACK"
    left = slo.ttft_p99_s - mean  # of step_share's 0.5, of which a step takes h = 0.5 of its time
    assert gate.admit(now, online(now), told, one, (left - 1e-6, 0.0)).tokens == 1
    assert gate.admit(now, online(now), told, one, (left + 1e-6, 0.0)).reason.name == "STEP_SHARE"
