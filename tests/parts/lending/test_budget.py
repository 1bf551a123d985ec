"""A KV budget: lent while unneeded, halved at once when needed, not grown until allowed."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rose.parts.lending.board import Control, Online
from rose.parts.lending.rules.budget import HALF_LIFE_S, Budget
from tests.parts.lending.conftest import lent_by

GIB = 2**30
TOTAL = 10 * GIB
MOST = int(0.81 * TOTAL)  # of the default watermark and reserve


@pytest.fixture
def budget():
    return Budget(lent_by(), TOTAL)


@pytest.fixture
def said(budget):
    """said(now, kv_used=..., share=..., ...) -> the budget when both boards said this just now."""

    def update(now, **state):
        boards = Online(pid=1, beat=now), Control(pid=1, beat=now, lend=1.0)
        for name, value in state.items():
            setattr(boards[not hasattr(boards[0], name)], name, value)
        return budget.update(now, *boards)

    return update


def test_it_grows_to_the_watermark_and_crossing_that_halves_and_freezes_it_at_once(budget, said):
    whole = said(0.0)
    assert whole == MOST and not budget.frozen
    assert said(0.1, kv_used=GIB // 2) == whole, "up to the watermark it may"
    assert said(0.2, kv_used=2 * GIB) == whole // 2 and budget.frozen
    assert said(0.3, kv_wanted=7 * GIB) == whole // 8
    assert said(900.0) == whole // 8, "the online engine is idle again: still frozen"
    assert said(901.0, epoch=1) == pytest.approx(whole) and not budget.frozen


def test_after_a_burst_it_grows_slowly_as_the_next_may_come(said):
    said(0.0, kv_used=8 * GIB)
    assert said(0.1) < 0.2 * GIB
    assert said(HALF_LIFE_S) == pytest.approx(0.81 * TOTAL - 4 * GIB, rel=0.01)


def test_the_hours_share_bounds_it_without_freezing(budget, said):
    said(0.0)
    assert said(1.0, share=0.25) == int(0.25 * 0.9 * TOTAL) and not budget.frozen
    assert said(2.0) == MOST


def test_silence_keeps_it_for_a_while_then_takes_it(budget, said):
    control = lambda now: Control(beat=now, lend=1.0)  # noqa: E731
    assert budget.update(0.0, None, control(0.0)) == 0, "nothing was ever heard"
    assert budget.update(9.0, Online(beat=0.0), control(9.0)) == 0
    whole = said(10.0)
    assert budget.update(10.5, Online(beat=10.0), control(10.5)) == whole
    assert budget.update(11.0, None, control(11.0)) == whole
    assert budget.update(13.0, None, None) == 0
    assert said(13.1) == whole


@pytest.mark.parametrize("needed", [math.nan, -1.0, math.inf, 50.0 * GIB])
def test_a_need_that_is_no_number_or_beyond_all_memory_takes_everything(said, needed):
    said(0.0)
    assert said(0.1, kv_wanted=needed, kv_used=needed) == 0


pauses, needs, shares = st.floats(-5, 20), st.floats(0, 1.5), st.sampled_from([0.0, 0.3, 1.0])
happens = st.tuples(pauses, needs, needs, shares, st.booleans(), st.booleans(), st.integers(0, 2))


@settings(deadline=None)
@given(st.lists(happens, max_size=60), st.floats(0.0, 0.9), st.floats(0.1, 1.0))
def test_it_never_passes_what_is_free_nor_grows_while_frozen(events, reserve, watermark):
    lending = lent_by(reserve=reserve, high_watermark=watermark)
    budget, now, epoch = Budget(lending, TOTAL), 100.0, 0
    for passed, used, wanted, share, silent, stopped, epochs in events:
        now, epoch = now + passed, epoch + epochs // 2  # the clock may go backwards
        before, frozen = budget.bytes, budget.frozen
        online = Online(beat=now, kv_used=used * TOTAL, kv_wanted=wanted * TOTAL)
        control = Control(beat=now, lend=float(not stopped), share=share, epoch=epoch)
        found = budget.update(now, None if silent else online, control)
        assert isinstance(found, int)
        assert 0 <= found <= max(0, int(min(0.9 * watermark, 1 - reserve) * TOTAL))
        if frozen and budget.frozen:
            assert found <= before
        if stopped or share == 0:
            assert found == 0
        elif not silent and found:
            need = max(used, wanted) * TOTAL
            assert found + need <= min(1 - reserve, watermark) * TOTAL + 1
            assert found <= share * TOTAL
