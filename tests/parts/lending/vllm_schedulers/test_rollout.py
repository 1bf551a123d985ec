"""The rollout engine's scheduler on vLLM's real queues and blocks."""

import threading
import time

import msgspec
import pytest

from rose.engine import plugin
from rose.parts.lending import board
from rose.parts.lending.rules.gate import Reason
from rose.parts.lending.vllm import pool, rollout

pytestmark = pytest.mark.slow  # imports vLLM
TOTAL = 64 * 4096


@pytest.fixture
def driven(boards, make_scheduler):
    boards.begin("online", kv_total=TOTAL, kv_held=TOTAL // 10)
    boards.begin("control", lend=1, share=1, epoch=1)
    return make_scheduler("rose.parts.lending.vllm.rollout")


def blocks_held(driven):
    return driven.scheduler.pool.limit_bytes // 4096


def test_an_idle_device_runs_rollouts_and_counts_what_is_lent(driven):
    driven.add("a", prompt=40, tokens=3)
    driven.steps(3)
    state = driven.scheduler.state
    assert driven.made == {"a": 3} and driven.ended == {"a": ("LENGTH", None)}
    assert (state.prompt_tokens, state.made_tokens, state.evicted) == (40, 3, 0) and state.open == 1


@pytest.mark.parametrize(
    "who, fields, reason",
    [
        ("online", {"hold_until": 1.0}, Reason.SLACK),
        ("online", {"lends": 0}, Reason.ONLINE_REFUSES),
        ("control", {"lend": 0}, Reason.STOPPED),
        ("control", {"share": 0}, Reason.HOUR),
    ],
)
def test_nothing_passes_a_shut_gate_and_it_opens_again(driven, boards, who, fields, reason):
    driven.add("a")
    driven.step()
    before = {name: getattr(boards.writers[who].state, name) for name in fields}
    boards.set(who, **fields)
    assert not any(driven.steps(5)) and driven.scheduler.state.shut_by == reason
    boards.set(who, **before)
    if "a" not in driven.ended:
        assert driven.step() == {"a": 1}


CALLS = [{}, {"kv_used": 0.9 * TOTAL}, {"hold_until": board.INFINITE}]


@pytest.mark.parametrize("call", CALLS, ids=["request", "memory", "time"])
def test_who_waits_at_a_shut_gate_hears_calls(driven, boards, monkeypatch, call):
    monkeypatch.setattr(rollout, "WAIT_S", 600.0)
    driven.add("a", prompt=150, tokens=100)
    driven.step()
    boards.set("online", hold_until=0.0)
    waiting = threading.Thread(target=driven.step, daemon=True)
    waiting.start()
    waiting.join(0.3)
    assert waiting.is_alive()
    if call:
        boards.set("online", **call)
    else:
        driven.scheduler._core.input_queue.put_nowait("a request")
    waiting.join(60.0)
    assert not waiting.is_alive()


def test_a_damaged_board_shuts_the_gate(driven, boards):
    driven.add("a")
    driven.step()
    boards.damage("online")
    assert not any(driven.steps(2)) and driven.scheduler.state.shut_by == Reason.ONLINE_SILENT


def test_steps_beside_the_online_engines_own_teach_nothing_about_step_times(driven, boards):
    driven.add("a")
    before = driven.scheduler._predictor.error
    boards.set("online", step_ends=time.monotonic() + 1)
    driven.steps(3)
    assert driven.made["a"] == 3 and driven.scheduler._predictor.error == before
    boards.set("online", step_ends=0.0)
    driven.step()
    assert driven.scheduler._predictor.error != before


def test_the_slack_bounds_a_step(driven, boards):
    """The predictor says 10 microseconds a prompt token beyond 1 ms; hold_p99 is 1."""
    boards.set("control", stops=0)
    driven.add("a", prompt=200)
    boards.set("online", hold_until=time.monotonic() + 1000.0)
    assert driven.step()["a"] == 200
    driven.add("b", prompt=200)
    driven.scheduler._gate.hold = 100.0  # holds up by 100 times of what it takes: 1 s is 10 ms
    boards.set("online", hold_until=time.monotonic() + 0.25)
    assert sum(driven.step().values()) < 201


def test_memory_that_is_wanted_back_is_released_at_once_with_whole_requests(driven, boards):
    for name in "abcd":
        driven.add(name, prompt=150, tokens=100)
    driven.steps(4)
    held = blocks_held(driven)
    assert held > 40 and driven.scheduler.pool.used > 30 * 4096
    boards.set("online", kv_used=0.6 * TOTAL, kv_wanted=0.6 * TOTAL, kv_held=0.7 * TOTAL)
    driven.step()
    state = driven.scheduler.state
    assert blocks_held(driven) <= held // 2 and state.frozen == 1
    assert state.kv_budget == driven.scheduler.pool.limit_bytes >= driven.scheduler.pool.used
    assert driven.ended and all(end == ("ABORT", plugin.EVICTED) for end in driven.ended.values())
    assert state.evicted == len(driven.ended) and state.wasted_tokens >= 150 * len(driven.ended)
    released = [ids for method, ids in driven.calls if method == "rose_release_blocks"]
    assert len(set(released[-1])) == held - blocks_held(driven)
    left = set("abcd") - set(driven.ended)
    assert set(driven.step()) == left, "the others go on"


def test_it_takes_what_is_lent_in_parts_and_revocations_between(driven, boards, monkeypatch):
    for module in (pool, rollout):
        monkeypatch.setattr(module, "AT_ONCE", 4 * 4096)
    driven.step()
    while driven.scheduler._wants_loop():
        before = blocks_held(driven)
        driven.step()
        assert 0 < blocks_held(driven) - before <= 4
    assert blocks_held(driven) > 20
    boards.set("control", lend=0)
    driven.step()
    assert not blocks_held(driven), "but that it gives back at once"


def test_while_it_rests_it_holds_no_memory_and_says_all_the_same_that_lending_began(driven, boards):
    driven.add("a", tokens=2)
    driven.steps(4)
    scheduler = driven.scheduler
    assert not scheduler.has_requests() and not scheduler._wants_loop()
    boards.set("control", lend=0)
    assert scheduler._wants_loop(), "it wakes to give memory back"
    driven.step()
    assert not blocks_held(driven) and not scheduler._wants_loop()
    boards.set("control", lend=1)
    driven.step()
    assert blocks_held(driven)
    scheduler.set_inactive(True)  # the operator lends again just then
    assert not blocks_held(driven) and scheduler.state.kv_budget == 0
    boards.set("control", lend=0)
    assert scheduler._wants_loop()
    driven.step()
    assert scheduler.state.shut_by == Reason.STOPPED and not scheduler._wants_loop()
    boards.set("control", lend=1)
    assert scheduler._wants_loop()
    driven.step()
    assert scheduler.state.shut_by == Reason.OPEN, "who sleeps until then hears of it"
    assert not blocks_held(driven) and not scheduler._wants_loop()
    scheduler.set_inactive(False)
    assert blocks_held(driven) and scheduler.state.kv_budget > 0


def test_who_waits_too_long_at_the_gate_is_handed_back(driven, boards):
    driven.add("a")
    driven.step()
    boards.set("online", hold_until=0.0)
    driven.scheduler._moved_at -= driven.scheduler._lending.patience_s
    driven.steps(2)
    assert driven.ended == {"a": ("ABORT", plugin.EVICTED)}


def test_a_request_larger_than_what_is_lent_is_handed_back_and_small_ones_run(driven, boards):
    boards.set("online", kv_held=0.8 * TOTAL)
    driven.add("large", prompt=400)
    driven.add("small", prompt=20, tokens=2)
    driven.steps(2)
    assert "large" not in driven.ended and driven.scheduler._large_since is not None
    driven.scheduler._large_since -= driven.scheduler._lending.patience_s
    driven.steps(4)
    assert driven.ended["large"] == ("ABORT", plugin.EVICTED) and driven.made["small"] == 2


def test_who_comes_to_a_shut_gate_after_a_long_idle_time_waits_as_long_as_others(driven, boards):
    boards.set("online", hold_until=0.0)
    driven.scheduler._moved_at = driven.scheduler._gate_since = time.monotonic() - 1000.0
    driven.add("a")
    driven.steps(2)
    assert not driven.ended
    assert driven.scheduler.state.open_s + driven.scheduler.state.shut_s < 900.0


def test_fewer_tokens_than_requests_reach_all_of_them_in_turn(driven, boards):
    for name in "abcdef":
        driven.add(name, prompt=8, tokens=50)
    driven.step()
    boards.set("online", hold_until=time.monotonic() + 100)
    gate = driven.scheduler._gate
    gate._lending = msgspec.structs.replace(gate._lending, chunk_tokens=2)
    served = {name for got in driven.steps(3) for name in got}
    assert served == set("abcdef")
