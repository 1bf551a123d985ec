"""One KV budget: lent while nobody needs it, halved at once when somebody does, and not grown again
until allowed."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rose.parts.lending.board import Control, Online
from rose.parts.lending.config import Lending
from rose.parts.lending.rules.budget import HALF_LIFE_S, Budget

GIB = 2**30
TOTAL = 10 * GIB
MOST = int(0.81 * TOTAL)  # of the default watermark and reserve


@pytest.fixture
def budget(lending):
    return Budget(lending(), TOTAL)


def test_it_grows_to_what_is_free_below_the_watermark(budget, online, control):
    assert budget.update(0.0, online(0.0), control(0.0)) == MOST
    assert not budget.frozen


def test_what_the_online_engine_wants_counts_like_what_it_uses(budget, online, control):
    assert budget.update(0.0, online(0.0, kv_used=GIB, kv_wanted=3 * GIB), control(0.0)) == int(
        0.81 * TOTAL - 3 * GIB
    )


def test_crossing_the_watermark_halves_it_at_once_until_under_and_freezes_it(
    budget, online, control
):
    whole = budget.update(0.0, online(0.0), control(0.0))
    # up to the watermark it may
    assert budget.update(0.1, online(0.1, kv_used=GIB // 2), control(0.1)) == whole
    assert budget.update(0.2, online(0.2, kv_used=2 * GIB), control(0.2)) == whole // 2
    assert budget.frozen
    assert budget.update(0.3, online(0.3, kv_wanted=7 * GIB), control(0.3)) == whole // 8
    # S is idle again: still frozen
    assert budget.update(900.0, online(900.0), control(900.0)) == whole // 8
    assert budget.update(901.0, online(901.0), control(901.0, epoch=1)) == pytest.approx(whole)
    assert not budget.frozen


def test_after_a_burst_it_grows_slowly_as_the_next_may_come(budget, online, control):
    budget.update(0.0, online(0.0, kv_used=8 * GIB), control(0.0))
    assert budget.update(0.1, online(0.1), control(0.1)) < 0.2 * GIB
    assert budget.update(HALF_LIFE_S, online(HALF_LIFE_S), control(HALF_LIFE_S)) == pytest.approx(
        0.81 * TOTAL - 4 * GIB, rel=0.01
    )


def test_stopped_by_the_operator_or_the_online_engine_it_is_0_at_once(budget, online, control):
    for stopped in (dict(lend=0.0), dict(share=0.0)):
        assert budget.update(0.0, online(0.0), control(0.0)) > 0
        assert budget.update(0.1, online(0.1), control(0.1, **stopped)) == 0
    assert budget.update(0.2, online(0.2), control(0.2)) > 0
    assert budget.update(0.3, online(0.3, lends=0), control(0.3)) == 0


def test_the_hours_share_bounds_it_without_freezing(budget, online, control):
    budget.update(0.0, online(0.0), control(0.0))
    assert budget.update(1.0, online(1.0), control(1.0, share=0.25)) == int(0.25 * 0.9 * TOTAL)
    assert not budget.frozen
    assert budget.update(2.0, online(2.0), control(2.0)) == MOST


def test_silence_keeps_it_for_a_while_then_takes_it(budget, online, control):
    whole = budget.update(0.0, online(0.0), control(0.0))
    assert budget.update(0.5, online(0.0), control(0.5)) == whole
    assert budget.update(1.0, None, control(1.0)) == whole
    assert budget.update(3.0, None, None) == 0
    assert budget.update(3.1, online(3.1), control(3.1)) == whole


def test_before_anything_is_heard_there_is_none(budget, online, control):
    assert (
        budget.update(0.0, None, control(0.0)) == budget.update(9.0, online(0.0), control(9.0)) == 0
    )


@pytest.mark.parametrize("needed", [math.nan, -1.0, math.inf, 50.0 * GIB])
def test_a_need_that_is_no_number_or_beyond_all_memory_takes_everything(
    budget, online, control, needed
):
    budget.update(0.0, online(0.0), control(0.0))
    board = online(0.1, kv_wanted=needed)
    board.kv_used = needed
    assert budget.update(0.1, board, control(0.1)) == 0


fractions = st.floats(0, 1.5)


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(
            st.floats(-5, 20),
            fractions,
            fractions,
            st.sampled_from([0.0, 0.3, 1.0]),
            st.booleans(),
            st.booleans(),
            st.integers(0, 2),
        ),
        max_size=60,
    ),
    st.floats(0.0, 0.9),
    st.floats(0.1, 1.0),
)
def test_it_never_passes_what_is_free_nor_grows_while_frozen_whatever_happens(
    events, reserve, watermark
):
    lending = Lending(
        profile=None,
        chunk_tokens=512,
        step_share=0.1,
        priority="idle",
        stops="layer",
        kv_gib=None,
        reserve=reserve,
        high_watermark=watermark,
        stale_after_s=0.25,
        revoke_after_s=2.0,
        patience_s=5.0,
        hours={},
        control_port=0,
        stop_file=None,
    )
    budget, now, epoch = Budget(lending, TOTAL), 100.0, 0
    for passed, used, wanted, share, silent, stopped, epochs in events:
        now, epoch = now + passed, epoch + epochs // 2  # the clock may go backwards
        before, frozen = budget.bytes, budget.frozen
        online = (
            None if silent else Online(beat=now, kv_used=used * TOTAL, kv_wanted=wanted * TOTAL)
        )
        found = budget.update(
            now, online, Control(beat=now, lend=0.0 if stopped else 1.0, share=share, epoch=epoch)
        )
        assert isinstance(found, int)
        assert 0 <= found <= max(0, int(min(0.9 * watermark, 1 - reserve) * TOTAL))
        if frozen and budget.frozen:
            assert found <= before
        if stopped or share == 0:
            assert found == 0
        elif not silent:
            need = max(used, wanted) * TOTAL
            assert found == 0 or found <= TOTAL - need - reserve * TOTAL + 1
            assert found == 0 or found + need <= watermark * TOTAL + 1
            assert found <= share * TOTAL
