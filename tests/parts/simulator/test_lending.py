"""Resources that serving leaves to rollouts: compute, memory, and latency within its targets."""

import dataclasses
from array import array

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose.parts.simulator import lending
from tests.parts.simulator.clusters import made_load, serving, steady_load

shares = st.lists(st.floats(0, 1), min_size=2, max_size=6)


def load(busy, kv=None):
    """Pieces of 10 s."""
    at, kv = 10.0 * np.arange(len(busy)), np.array(kv or [0.2] * len(busy))
    return made_load(at, np.array(busy), kv, 100, 10.0 * len(busy))


def budget(kv, **changes):
    found = serving(load([0.1] * len(kv), kv), **{"high_watermark": 0.9, "reserve": 0.05} | changes)
    return lending.Budget(found, lending.Changes(found.devices.loads, found.step), 0.0)


@given(shares, st.floats(0, 500), st.floats(0, 100))
def test_work_time_passes_at_the_idle_share(busy, wall, ahead):
    busy[0] = min(busy[0], 0.9)
    found = load(busy)
    pace = lending.Pace(found, 1 - found.busy, 0.0).moved(ahead)
    work = pace.work(wall)
    assert pace.work(pace.wall(work)) == pytest.approx(work, abs=1e-6)
    # Where no work passes, a rounding of `work` decides between that time's beginning and its end.
    assert pace.wall(work - 1e-9 * (1 + work)) <= wall + 1e-6
    assert pace.work(wall + found.period_s) - work == pytest.approx(10.0 * (1 - found.busy).sum())


@given(shares, st.integers(1, 30))
def test_what_is_lent_and_used_never_exceeds_the_device(kv, looks):
    found = budget(kv)
    for at in np.linspace(0, 10.0 * len(kv), looks):
        used = found._changes.used_at(at)
        share = found.update(at)
        assert 0 <= share <= max(0.0, min(0.9, 0.95) - used) + 1e-9


def test_memory_called_back_is_halved_and_stays_so_until_a_step_begins():
    found = budget([0.1, 0.5, 0.1])
    before = found.update(0.0)
    assert before == pytest.approx(0.9 * 0.9 - 0.1)
    assert found.update(10.0) == pytest.approx(before / 2) and found.frozen
    assert found.update(29.0) == pytest.approx(before / 2)
    found.thaw()
    assert found.update(29.9) > before / 2 and not found.frozen


def test_shared_memory_follows_serving_both_ways():
    found = budget([0.1, 0.5, 0.1], executor="memory_only")
    assert [found.update(at) for at in (0.0, 10.0, 20.0)] == pytest.approx([0.85, 0.45, 0.85])


def test_small_changes_of_memory_are_not_worth_a_word():
    changes = lending.Changes(load([0.1] * 5, [0.10, 0.12, 0.30, 0.31, 0.29]), 0.05)
    assert changes.at == [0.0, 20.0]
    assert changes.after(0.0) == 20.0 and changes.after(20.0) == 50.0  # it begins anew


def observed(what, spans, seconds=100.0):
    observer = lending.Observer("pool", what, seconds)
    observer.add(what.devices.loads, 0.0, array("d", spans))
    return observer.result()


@pytest.mark.parametrize(
    ("executor", "lent"), [("gate", 0.6 * 0.9), ("memory_only", 0.6 + 0.4 / 2), ("none", 1.0)]
)
def test_what_is_lent_is_what_serving_leaves_under_each_executor(executor, lent):
    what = serving(steady_load(busy=0.4), executor, overhead=0.1)
    assert observed(what, []).lent == pytest.approx(lent)


def test_requests_are_counted_and_attained_as_their_latencies_say():
    what = serving(load([0.3] * 10))
    use = observed(what, [])
    assert use.requests == pytest.approx(1000)
    assert use.beside == use.alone
    found = use.alone.ttft_p99_s
    assert found == np.quantile(what.devices.loads.ttft_s, 0.99, method="inverted_cdf")
    assert use.minute_requests == pytest.approx([600, 400])


def test_a_rare_late_request_is_seen_where_it_is_and_weighs_what_it_weighs():
    found = load([0.3] * 10)
    found.ttft_s[:] = 0.1
    found.ttft_s[-12:] = 3.0  # of 1,000, all in the last tenth
    found.tpot_s[::2] = np.nan  # one token: no TPOT, and none that is late
    use = observed(serving(found), [], seconds=90.0)
    assert use.alone.ttft_attained == 1 and use.alone.ttft_p99_s == 0.1
    assert use.minute_attained.tolist() == [1, 1]
    use = observed(serving(found), [])
    assert use.alone.ttft_attained == pytest.approx(0.988) and use.alone.ttft_p99_s == 3.0
    assert use.minute_attained.tolist() == pytest.approx([1, 1 - 12 / 400])
    assert use.alone.tpot_attained == 1


def slowed(found, factor):
    times = {name: factor * getattr(found, name) for name in ("ttft_s", "tpot_s")}
    slower = dataclasses.replace(found, busy=np.minimum(1, factor * found.busy), **times)
    return dataclasses.replace(found, beside=slower)


def test_what_rollouts_cost_is_in_proportion_to_the_time_beside():
    what = serving(slowed(steady_load(busy=0.6), 6), "memory_only")
    spans = [], [0.0, 50.0], [0.0, 100.0]
    never, half, always = (observed(what, each).beside for each in spans)
    expected = pytest.approx((never.tpot_attained + always.tpot_attained) / 2, abs=1e-6)
    assert half.tpot_attained == expected
    assert always.tpot_attained < never.tpot_attained
    assert always.ttft_p99_s == pytest.approx(6 * never.ttft_p99_s)


def test_the_gate_lends_what_serving_leaves_at_its_slower_pace():
    slower = dataclasses.replace(steady_load(busy=0.8), beside=steady_load(busy=0.2))
    assert lending.rates(serving(slower, overhead=0.0), slower) == pytest.approx([0.8])
    always = slowed(steady_load(busy=0.8), 2)
    # time slices
    assert lending.rates(serving(always, "memory_only"), always) == pytest.approx([0.5])
