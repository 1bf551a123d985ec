"""An online server's traffic as load: fast-forwarded, and at the pace of its targets."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rose.parts.simulator import online, serving, traces
from rose.parts.simulator.spec import Engine, StepTime
from rose.parts.simulator.traces import Trace
from tests.parts.simulator.stepwise import first_and_last

STEP = StepTime(c0=0.008, c1=2.6e-5, c2=7e-10, c3=1e-5, c4=2e-8)
ENGINE = Engine(
    STEP, max_sequences=64, max_batched_tokens=2048, kv_tokens=300_000, prefix_caching=False
)


def trace(*requests: tuple[float, int, int]) -> Trace:
    at, prompt, output = zip(*requests, strict=False)
    return Trace(np.array(at, float), np.array(prompt, np.int32), np.array(output, np.int32))


request = st.tuples(st.floats(0, 0.5), st.integers(1, 5000), st.integers(1, 60))
requests = st.lists(request, min_size=1, max_size=20)


@settings(max_examples=60, deadline=None)
@given(requests, st.sampled_from([2, 64]), st.sampled_from([6000, 300_000]))
def test_skipping_over_like_steps_changes_no_time(requests, sequences, kv):
    at = np.cumsum([gap for gap, _, _ in requests])
    engine = replace(ENGINE, max_sequences=sequences, kv_tokens=kv)
    requests = [(t, *sizes) for t, (_, *sizes) in zip(at, requests, strict=True)]
    work = trace(*requests)
    served = online.serve(work, engine)
    expected = first_and_last(requests, STEP, sequences, engine.max_batched_tokens, kv)
    assert served.at + served.ttft_s == pytest.approx([first for first, _ in expected], abs=1e-9)
    each = zip(expected, work.output_tokens, strict=True)
    tpot = [(last - first) / (o - 1) if o > 1 else math.nan for (first, last), o in each]
    assert served.tpot_s == pytest.approx(tpot, abs=1e-9, nan_ok=True)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 1000), st.sampled_from([0.0, 0.05]), st.sampled_from([0.0, 0.02]))
def test_what_is_counted_per_piece_is_what_happened(seed, pace, hold):
    work = traces.generate(seed, seconds=30, rate=4)
    served = online.serve(work, ENGINE, pace, hold)
    made = serving.load(served, ENGINE.kv_tokens)
    assert len(made.requests) == len(work) == len(made.ttft_s)
    assert len(made.at) == math.ceil(work.seconds) == made.period_s
    assert (served.began[1:] >= served.ended[:-1] - 1e-9).all()
    assert (served.busy_s <= served.ended - served.began + 1e-9).all()
    within = served.ended <= made.period_s
    assert made.busy.sum() <= served.busy_s.sum() + 1e-6
    assert made.busy.sum() >= served.busy_s[within].sum() - 1e-6
    assert ((made.kv >= 0) & (made.kv <= 1)).all()
    assert made.kv.max() * ENGINE.kv_tokens <= served.held.max() + 1
    assert served.tokens.sum() == (np.maximum(work.output_tokens, 1) - 1).sum()
    assert (served.gap_s[served.tokens > 0] > 0).all()
    assert (served.ttft_s > 0).all() and (served.tpot_s[work.output_tokens > 1] > 0).all()


def test_one_request_takes_what_its_steps_take():
    served = online.serve(trace((0.0, 1000, 11)), ENGINE)
    prefill = 1000 * (STEP.c1 + STEP.c2 * 500)
    decodes = sum(STEP.c0 + STEP.c3 + STEP.c4 * (1001 + k) for k in range(10))
    assert served.ttft_s.tolist() == pytest.approx([prefill])
    assert served.tpot_s.tolist() == pytest.approx([decodes / 10])
    assert served.busy_s.sum() == pytest.approx(prefill + decodes)


def test_at_the_pace_of_its_targets_serving_computes_less_and_keeps_them():
    work = traces.generate(1, seconds=120, rate=3)
    alone, beside = (online.serve(work, ENGINE, *pace) for pace in ((), (0.075, 0.02)))
    assert beside.busy < 0.5 * alone.busy
    assert alone.p99()[1] < beside.p99()[1] <= 0.076
    assert beside.p99()[0] - alone.p99()[0] < 0.05
    assert beside.held.max() > alone.held.max()  # slower requests are more at once


def test_a_second_of_peak_traffic_is_a_second_of_peak_load_on_every_device():
    work = traces.generate(2, seconds=120, rate=8)
    found = serving.devices(work, ENGINE, count=16, variants=4)
    loads = [found.load(device) for device in range(16)]
    assert len({id(load) for load, _ in loads}) == 4 and all(0 <= ahead < 1 for _, ahead in loads)
    assert sum(len(load.requests) for load in found.loads) == len(work)
    rates = np.array([np.bincount(load.requests, minlength=120)[:110] for load in found.loads])
    assert np.corrcoef(rates).min() > 0.5


def test_what_is_done_beside_rollouts_comes_in_the_same_pieces():
    work = traces.generate(2, seconds=60, rate=4)
    beside = serving.Beside(ENGINE, 0.075, 0.02)
    found = serving.devices(work, ENGINE, count=2, variants=2, beside=beside)
    assert found.gap_p99_s[1] > found.gap_p99_s[0] > 0
    for alone in found.loads:
        assert len(alone.beside.at) == len(alone.at) and alone.beside.period_s == alone.period_s
        assert (alone.beside.requests == alone.requests).all()
        assert alone.beside.busy.sum() < alone.busy.sum() and alone.beside.kv.sum() > alone.kv.sum()


def served_with(blocks, kv=300_000, caching=True):
    work = trace(*[(float(at), 512 * len(each), 1) for at, each in enumerate(blocks)])
    engine = replace(ENGINE, kv_tokens=kv, prefix_caching=caching)
    return online.serve(replace(work, blocks=blocks), engine).ttft_s


def test_a_prefix_that_was_served_before_is_not_computed_again():
    blocks = ((1, 2, 3, 4), (1, 2, 3, 4), (1, 2, 7, 8), (9, 2, 3, 4))
    alone = served_with(blocks, caching=False)
    assert np.ptp(alone) < 1e-9
    first, same, half, other = served_with(blocks)
    assert (first, other) == pytest.approx((alone[0], alone[0]))
    assert same == pytest.approx(STEP.c0)  # its last token, computed anew, is bound by the weights
    assert half == pytest.approx(1024 * (STEP.c1 + STEP.c2 * (1024 + 512)))


def test_what_was_used_longest_ago_is_forgotten_first_and_running_requests_come_before_all():
    blocks = tuple((10 * k, 10 * k + 1) for k in range(3))
    again = served_with((*blocks, blocks[1], blocks[2], blocks[0]), kv=4 * 512 + 1)
    whole = served_with(blocks[:1], caching=False)[0]
    assert again[[0, 1, 2, 5]] == pytest.approx(whole) and (again[[3, 4]] < whole / 2).all()


def test_a_token_that_a_prompt_holds_up_is_late_though_its_requests_mean_is_not():
    served = online.serve(trace((0.0, 10, 60), (0.1, 2000, 1)), ENGINE)
    step = 2000 * (STEP.c1 + STEP.c2 * 1000)
    assert online.gap_p99([served]) == pytest.approx(step, rel=0.02)
    assert served.tpot_s[0] < STEP.c0 + step / 50
    assert math.isnan(online.gap_p99([online.serve(trace((0.0, 10, 1)), ENGINE)]))


def test_beside_rollouts_that_nobody_controls_steps_take_longer_and_queues_do_more_than_that():
    work = traces.generate(3, seconds=120, rate=10)
    beside = serving.contended(ENGINE, 1.0)
    [found] = serving.devices(work, ENGINE, count=1, variants=1, beside=beside).loads
    assert (found.beside.tpot_s > 1.9 * found.tpot_s)[~np.isnan(found.tpot_s)].mean() > 0.9
    assert np.percentile(found.beside.ttft_s, 99) > 2.2 * np.percentile(found.ttft_s, 99)


def test_a_service_is_sized_so_that_its_peaks_just_meet_the_targets():
    work = traces.generate(1, seconds=90, rate=2)
    factor = serving.provisioned(work, ENGINE, 0.5, 0.15)
    assert online.serve(work.scaled(factor), ENGINE).attained(0.5, 0.15) >= 0.99
    assert online.serve(work.scaled(factor / 1.25), ENGINE).attained(0.5, 0.15) < 0.99
    with pytest.raises(ValueError, match="loosen the targets"):
        serving.provisioned(work, ENGINE, 0.001, 0.15)
