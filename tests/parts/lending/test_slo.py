"""How long the online engine may be kept from the device, and whether it meets its targets."""

import math
import random
import statistics

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rose.parts.lending.rules import slo as rules
from rose.parts.lending.rules.predictor import Predictor, Work
from rose.parts.lending.rules.slo import FORGET_S, IDLE_S, JUDGED, Request, hold_until
from tests.parts.lending.conftest import COEFFICIENTS, SLO

NOW = 100.0


def prefill(predictor, *chunks, decodes=0, context=0):
    return predictor.p99(Work(chunks, decodes, context))


@pytest.fixture
def left(predictor):
    """left(requests, ...) -> seconds for which the engine may be kept away, beyond NOW."""
    return lambda *requests, **more: hold_until(NOW, list(requests), predictor, SLO, **more) - NOW


def test_without_requests_there_is_no_limit_and_for_a_late_one_no_time(left):
    assert left() == math.inf and left(Request(NOW - 3, 10, 0)) < 0


def test_decodes_beside_a_prefill_take_their_time_and_their_place(left, predictor):
    running = [Request(NOW - 5, 0, 1000, NOW, 1) for _ in range(10)]
    found = left(Request(NOW, 90, 0), *running, max_batched_tokens=50)
    chunks = (40, 0), (40, 40), (10, 80)
    steps = [prefill(predictor, chunk, decodes=10, context=10000) for chunk in chunks]
    assert found == pytest.approx(min(1 - sum(steps), 0.2 - steps[0]))


def test_the_next_token_is_due_when_the_mean_time_per_token_would_reach_its_target(left, predictor):
    step = prefill(predictor, decodes=1, context=50)
    # 10 tokens: the eleventh is due 2 s after the first
    assert left(Request(NOW - 9, 0, 50, NOW - 1.9, 10)) == pytest.approx(0.1 - step)
    # The credit of a fast start is capped.
    fast = Request(NOW - 9, 0, 50, NOW - 1, 1000, NOW - 0.3)
    assert left(fast) == pytest.approx(-0.3 + rules.CREDIT * 0.2 - step)


def test_a_preempted_request_is_due_by_its_tokens_after_its_prefill(left, predictor):
    expected = pytest.approx(-1 + 8 * 0.2 - prefill(predictor, (500, 0)))
    assert left(Request(NOW - 9, 500, 0, NOW - 1, 8)) == expected


def test_with_more_requests_than_sequences_nothing_can_be_promised(left):
    queue = [Request(NOW, 10, 0)] * 3
    assert left(*queue, max_sequences=3) > 0 == left(*queue, max_sequences=2)


none, prompts, begun = st.none(), st.integers(0, 5000), st.floats(90, 100)
waiting = st.builds(Request, begun, prompts, st.integers(0, 500), none, st.just(0), none)
tokens, last = st.integers(1, 50), none | st.floats(99, 100)
running = st.builds(Request, st.just(80.0), st.just(0), st.integers(1, 3000), begun, tokens, last)


PREDICTOR = Predictor(COEFFICIENTS)


@settings(max_examples=50, deadline=None)
@given(st.lists(waiting | running, min_size=1, max_size=20), running, st.integers(40, 3000))
def test_one_more_decode_never_gives_more_time(requests, another, batched):
    assert math.isfinite(hold_until(NOW, requests, PREDICTOR, SLO, batched))
    before, after = (
        hold_until(NOW, each, PREDICTOR, SLO, max(batched, 100))
        for each in (requests, [*requests, another._replace(arrival=101.0)])
    )
    assert after <= before + 1e-9


@settings(max_examples=50, deadline=None)
@given(st.lists(waiting, min_size=1, max_size=10), st.integers(40, 3000))
def test_kept_away_so_long_every_first_token_is_in_time_and_one_only_just(requests, batched):
    """Replays the steps that the rule counts on, one token budget at a time."""
    clock = hold_until(NOW, requests, PREDICTOR, SLO, batched)
    queue = sorted(requests, key=lambda r: r.arrival)
    left = [[r.arrival, max(1, r.prompt_left), r.context] for r in queue]
    decodes, context, spare = 0, 0, []
    while left:
        room, chunks, done = max(1, batched - decodes), [], []
        for request in left:
            new = min(room, request[1])
            if not new:
                break
            chunks.append((new, request[2]))
            room, request[1], request[2] = room - new, request[1] - new, request[2] + new
            if not request[1]:
                done.append(request)
        clock += PREDICTOR.p99(Work(tuple(chunks), decodes, context))
        for request in done:
            spare.append(request[0] + SLO.ttft_p99_s - clock)
            decodes, context = decodes + 1, context + request[2]
        left = [r for r in left if r[1]]
    assert min(spare) == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize(
    "change, words",
    [
        ({}, ""),
        ({"tpot_p99_s": 0.02}, "tpot_p99_s=0.02 s can't be met even alone: a step of 1 decode"),
        ({"tpot_p50_s": 0.02}, "tpot_p50_s"),
        ({"ttft_p99_s": 0.1}, "the prefill of 1000 tokens takes 0.25 s"),
        ({"ttft_p50_s": 0.1}, "ttft_p50_s"),
    ],
)
def test_targets_that_the_device_can_not_meet_alone_are_named(predictor, change, words):
    found = rules.why_not_alone(predictor, msgspec.structs.replace(SLO, **change), 1000, 2048)
    assert words in found if words else not found


def test_attainment_counts_by_lending():
    seen = rules.Attainment(SLO)
    assert seen.add(NOW, 0.9, 0.1, lent=True) and seen.add(NOW, 0.9, None, lent=False)
    assert not seen.add(NOW, 1.1, 0.1, lent=True)
    assert not seen.add(NOW, 0.5, 0.3, lent=False)
    assert not seen.add(NOW, None, None, lent=False)
    assert (seen.finished, seen.met, seen.finished_lending, seen.met_lending) == (5, 2, 2, 1)


def test_an_engine_that_misses_by_itself_lends_only_while_idle_until_it_recovers():
    seen = rules.Attainment(SLO)
    for _ in range(300):
        seen.add(NOW, 9.0, 0.1, lent=True)
    assert not seen.misses_alone(NOW, busy=True), "misses while lending are not its own"
    now = NOW
    for _ in range(JUDGED):
        assert not seen.misses_alone(now, busy=True), "too few to say"
        now += 2 * IDLE_S
        seen.add(now, 9.0, 0.1, lent=False)
    now += 2 * IDLE_S
    assert seen.misses_alone(now, busy=True), "a long request is no pause"
    assert seen.misses_alone(now + IDLE_S, busy=False)
    now += IDLE_S + 1
    assert not seen.misses_alone(now, busy=False)
    assert seen.misses_alone(now, busy=True), "lent until its next request"
    for _ in range(3):
        seen.add(now, 0.1, 0.1, lent=True)
    assert seen.misses_alone(now, busy=True), "and not judged by what ran while lent"
    for _ in range(300):
        seen.add(now, 0.1, 0.1, lent=False)
    assert not seen.misses_alone(now, busy=True)


@pytest.mark.parametrize("delay", [0.0, 0.3, 2.0])
def test_the_median_of_first_tokens_is_kept_while_requests_lose_time_to_rollouts(delay):
    """SLO.ttft_p50_s is 0.5; alone it would be 0.4, and the whole share costs `delay`."""
    rng, promptness, now, found, shares = random.Random(1), rules.Promptness(SLO), 100.0, [], []
    for _ in range(2000):
        now += 1.0
        shares.append(promptness.share(now))
        found.append(0.4 * math.exp(rng.gauss(0, 0.5)) + delay * shares[-1])
        promptness.add(now, found[-1])
    needed = min(1.0, 0.1 / delay) if delay else 1.0
    assert statistics.median(found[200:]) < SLO.ttft_p50_s * 1.06
    # no more is taken than that
    assert statistics.mean(shares[200:]) == pytest.approx(needed, rel=0.2)


def test_late_first_tokens_are_forgotten_on_an_idle_device():
    promptness = rules.Promptness(SLO)
    assert promptness.share(0.0) == promptness.share(1e9) == 1.0
    for at in range(100):
        promptness.add(float(at), 9.0)
    assert 0 < promptness.share(99.0) == promptness.share(99.0 + FORGET_S) < 0.02
    assert promptness.share(100.0 + FORGET_S) == 1.0
    promptness.add(100.0 + FORGET_S, 9.0)
    assert promptness.share(100.0 + FORGET_S) == pytest.approx(0.9)
