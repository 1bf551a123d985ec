"""One engine for both sides: online requests first, and never one of them preempted for a rollout."""

import os
import threading
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rose.coserving import board, names, shared

pytestmark = pytest.mark.slow  # imports vLLM


@pytest.fixture
def driven(boards, make_scheduler):
    boards.begin("control", board.Control, lend=1, share=1)
    return make_scheduler("rose.coserving.shared", policy="priority")


def rollout(driven, name, **request):
    driven.add(name, priority=names.ROLLOUT_PRIORITY, **request)


def test_rollouts_run_while_nobody_else_is_there(driven):
    rollout(driven, "r", prompt=100, tokens=4)
    driven.steps(4)
    assert driven.made == {"r": 4} and driven.scheduler.rollout_state.made_tokens >= 3


def test_an_online_prompt_is_not_shared_with_prompts_of_rollouts(driven):
    for i in range(4):
        rollout(driven, f"r{i}", prompt=200, tokens=4)
    driven.add("a", prompt=200, tokens=4)
    assert driven.step() == {"a": 200}


def test_rollouts_decode_beside_online_requests_within_their_slack(driven):
    for i in range(4):
        rollout(driven, f"r{i}", prompt=20, tokens=100)
    driven.steps(2)
    driven.add("a", prompt=100, tokens=50)
    got = driven.step()
    assert got.pop("a") == 100 and got and all(count == 1 for count in got.values())


def test_an_online_prompt_that_comes_after_a_small_step_is_not_taken_for_many_small_ones(driven):
    import msgspec

    scheduler = driven.scheduler
    scheduler._lending = msgspec.structs.replace(scheduler._lending, chunk_tokens=2)
    rollout(driven, "r", prompt=60, tokens=100)
    driven.step()
    assert scheduler.max_num_scheduled_tokens == 2  # a rollout's prompt in small chunks
    driven.add("a", prompt=400, tokens=5)
    arrival = scheduler._seen["a"].arrival  # 400 tokens take 2 steps of 256, 5 ms; in chunks of 2 they would take 0.2 s
    assert scheduler._hold_until() - arrival == pytest.approx(scheduler._slo.ttft_p99_s - 0.005, abs=0.02)


def test_without_slack_they_wait(driven):
    rollout(driven, "r", prompt=20, tokens=100)
    driven.step()
    driven.add("a", prompt=20, tokens=50)
    driven.step()
    seen = driven.scheduler._seen["a"]
    seen.arrival = seen.first_token_at = seen.last_token_at = time.monotonic() - 100.0  # far behind its target
    assert driven.step() == {"a": 1}


def test_an_online_request_that_a_prompt_held_up_catches_up_with_its_median_before_rollouts_go_on(driven):
    rollout(driven, "r", prompt=20, tokens=100)
    driven.step()
    driven.add("a", prompt=20, tokens=50)
    driven.step()
    slo, seen = driven.scheduler._slo, driven.scheduler._seen["a"]
    late = 1.5 * slo.tpot_p50_s  # within tpot_p99_s
    seen.first_token_at = seen.last_token_at - late
    assert driven.step() == {"a": 1}
    seen.first_token_at = seen.last_token_at - (seen.tokens - 1) * slo.tpot_p50_s
    assert driven.step() == {"a": 1, "r": 1}


def test_rollouts_make_way_while_most_first_tokens_come_later_than_their_median_target(driven, monkeypatch):
    monkeypatch.setattr("rose.coserving.slo.FORGET_S", 1e6)
    rollout(driven, "r", prompt=20, tokens=200)
    driven.step()
    for i in range(60):
        driven.add(f"a{i}", prompt=20, tokens=1)
        driven.scheduler._seen[f"a{i}"].arrival -= 0.3  # within ttft_p99_s
        driven.step()
    assert driven.step() == {} and driven.scheduler.rollout_state.waiting + driven.scheduler.rollout_state.running == 1
    driven.scheduler._publish()
    assert driven.scheduler.state.prompt_share < 0.02  # of 50 ms; a step takes 1 ms
    for i in range(60):
        driven.add(f"b{i}", prompt=20, tokens=1)
        driven.step()
    assert driven.step() == {"r": 1}


def test_rollouts_hold_a_queue_of_online_prompts_up_once_and_not_at_each_of_its_steps(driven):
    import msgspec

    for i in range(4):
        rollout(driven, f"r{i}", prompt=20, tokens=100)
    driven.steps(2)
    scheduler = driven.scheduler
    one = scheduler._held_up  # seconds of a step of four decodes
    share = 1.001 * one / scheduler._slo.ttft_p99_s
    scheduler._lending = msgspec.structs.replace(scheduler._lending, step_share=share)
    for name in "abc":
        driven.add(name, prompt=250, tokens=1)
    beside = [sum(name.startswith("r") for name in got) for got in driven.steps(3)]
    assert beside == [0, 0, 0], "the step that was under way when they came has cost them all of it"
    assert sum(name.startswith("r") for name in driven.step()) == 4


def test_fewer_tokens_than_rollouts_reach_all_of_them_in_turn(driven):
    import msgspec

    for i in range(6):
        rollout(driven, f"r{i}", prompt=8, tokens=100)
    driven.step()
    scheduler = driven.scheduler
    scheduler._lending = msgspec.structs.replace(scheduler._lending, chunk_tokens=2)
    assert {name for got in driven.steps(3) for name in got} == {f"r{i}" for i in range(6)}


def test_rollouts_are_handed_back_for_the_memory_of_an_online_prompt(driven):
    for i in range(4):
        rollout(driven, f"r{i}", prompt=200, tokens=100)
    driven.steps(5)
    driven.add("a", prompt=400, tokens=20)
    driven.steps(3)
    assert driven.made.get("a", 0) >= 1 and driven.scheduler.state.preempted == 0
    assert driven.ended and all(end == ("ABORT", names.EVICTED) for end in driven.ended.values())
    assert driven.scheduler.rollout_state.evicted == len(driven.ended)


def test_an_engine_that_lends_to_itself_is_not_ended_for_memory_that_prompts_wait_for(driven, monkeypatch):
    monkeypatch.setattr(os, "kill", lambda *_: pytest.fail("it would end itself"))
    rollout(driven, "r", prompt=200, tokens=100)
    driven.steps(2)
    for name in "abc":
        driven.add(name, prompt=400, tokens=20)
    driven.scheduler._publish()
    driven.scheduler._rollout._looked_at = float("-inf")
    driven.scheduler._asked_at = time.monotonic() - 100.0
    driven.scheduler._beats_once()


def test_another_policy_than_priority_is_refused(boards, make_scheduler):
    with pytest.raises(ValueError, match="--scheduling-policy priority"):
        make_scheduler("rose.coserving.shared")


def test_when_lending_is_stopped_rollouts_wait_and_are_handed_back(driven, boards):
    rollout(driven, "r", prompt=20, tokens=100)
    driven.step()
    boards.set("control", lend=0)
    assert not driven.step()
    driven.scheduler._moved_at -= driven.scheduler._lending.patience_s
    driven.steps(3)
    assert driven.ended == {"r": ("ABORT", names.EVICTED)}


arrivals = st.lists(st.tuples(st.booleans(), st.integers(1, 300), st.integers(1, 60), st.integers(0, 5)), max_size=25)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(arrivals=arrivals)
def test_no_online_request_is_ever_preempted_and_every_request_ends_once(boards, make_scheduler, arrivals):
    if "control" not in boards.writers:
        boards.begin("control", board.Control, lend=1, share=1)
    driven = make_scheduler("rose.coserving.shared", policy="priority", max_num_seqs=32)
    # online requests alone fit: else vLLM preempts among them, which is not a rollout's doing
    online = 0
    for i, (is_rollout, prompt, tokens, steps) in enumerate(arrivals):
        need = -(-(prompt + tokens) // 16) + 1
        if is_rollout:
            rollout(driven, f"r{i}", prompt=prompt, tokens=tokens)
        elif online + need < 60:
            online += need
            driven.add(f"o{i}", prompt=prompt, tokens=tokens)
        driven.steps(steps)
        scheduler = driven.scheduler
        live = [r.request_id for r in [*scheduler.running, *scheduler.waiting]]
        assert sorted(live) == sorted(scheduler.requests), "in one queue each"
    for _ in range(3000):
        if not driven.scheduler.has_requests():
            break
        driven.step()
    assert driven.scheduler.state.preempted == 0
    asked = {name: tokens for name, tokens in
             ((f"{'r' if a[0] else 'o'}{i}", a[2]) for i, a in enumerate(arrivals)) if name in driven.ended}
    assert not driven.scheduler.requests
    for name, tokens in asked.items():
        if driven.ended[name][0] == "LENGTH":
            assert driven.made[name] == tokens
        else:
            assert name.startswith("r")


def test_a_loop_with_nothing_but_refused_rollouts_rests_until_somebody_calls(driven, boards, monkeypatch):
    rollout(driven, "r", prompt=20, tokens=100)
    driven.step()
    boards.set("control", lend=0)
    driven.step()
    monkeypatch.setattr(shared, "LAST_WAIT_S", 600.0)
    driven.scheduler._moved_at -= 500.0  # less than its patience
    waiting = threading.Thread(target=driven.step, daemon=True)
    waiting.start()
    waiting.join(0.3)
    assert waiting.is_alive()
    driven.scheduler._core.input_queue.put_nowait("a request")
    waiting.join(60.0)
    assert not waiting.is_alive()


def test_the_budget_is_what_rollouts_could_hold_and_nothing_while_lending_is_stopped(driven, boards):
    scheduler = driven.scheduler
    reserve = scheduler._reserve
    scheduler._publish()
    state = scheduler.rollout_state
    assert (state.open, state.kv_total, state.kv_budget) == (1, scheduler.pool.total, scheduler.pool.total - reserve)
    driven.add("a", prompt=160, tokens=50)
    rollout(driven, "r", prompt=100, tokens=50)
    driven.steps(3)
    online = scheduler.pool.used - state.kv_used
    assert state.kv_used > 0 and online >= 10 * scheduler.pool.block_bytes
    assert state.kv_budget == scheduler.pool.total - reserve - online and state.steps >= 1
    boards.set("control", share=0.25)
    scheduler._publish()
    assert state.kv_budget == scheduler.pool.total / 4
    boards.set("control", lend=0)
    scheduler._publish()
    assert state.kv_budget == 0


def test_prefixes_are_forgotten_with_the_weights_that_cached_them_while_requests_run_on(driven):
    driven.add("a", prompt=64, tokens=40)
    driven.steps(2)
    blocks = driven.scheduler.kv_cache_manager
    request = driven.scheduler.requests["a"]
    cached = lambda: blocks.get_computed_blocks(request)[1]  # noqa: E731
    assert cached() > 0
    assert driven.scheduler.reset_prefix_cache()
    assert cached() == 0
    driven.steps(45)
    assert driven.made == {"a": 40} and driven.scheduler.state.preempted == 0
