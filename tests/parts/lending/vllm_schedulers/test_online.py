"""The online engine's scheduler: what it tells of its requests, and how lent memory returns."""

import os
import signal
import subprocess
import time

import msgspec
import pytest

from rose.parts.lending import board
from rose.parts.lending.rules import slo
from rose.parts.lending.vllm import online, pool
from tests.parts.lending.vllm_schedulers.conftest import abort

pytestmark = pytest.mark.slow  # imports vLLM
TOTAL = 64 * 4096


@pytest.fixture
def driven(boards, make_scheduler):
    boards.begin("control", lend=1, share=1)
    return make_scheduler("rose.parts.lending.vllm.online")


@pytest.fixture
def clock(monkeypatch):
    """clock[0]: what time.monotonic says. time.time stands still."""
    now, wall = [time.monotonic()], time.time()
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(time, "time", lambda: wall)
    return now


def test_without_requests_it_is_held_up_for_ever_and_with_one_until_its_target(driven, clock):
    state, now = driven.scheduler.state, clock[0]
    driven.scheduler._write_board()
    assert state.hold_until == board.INFINITE
    driven.add("a", prompt=100, tokens=5)
    # 0.5 s, but for its own prefill
    assert state.waiting == 1 and now + 0.4 < state.hold_until < now + 0.5
    driven.step()
    # the next token, 4 targets ahead at most
    assert state.running == 1 and state.hold_until < now + 0.4
    driven.steps(4)
    assert state.hold_until == board.INFINITE and (state.finished, state.met) == (1, 1)
    assert (state.prompt_tokens, state.made_tokens) == (100, 5)


def test_a_clock_that_was_set_changes_nothing(driven, monkeypatch):
    driven.add("a")
    before = driven.scheduler.state.hold_until
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + 3600.0)
    driven.scheduler._write_board()
    assert driven.scheduler.state.hold_until == pytest.approx(before, abs=0.01)


def test_requests_are_counted_apart_while_anything_is_lent(driven, boards):
    driven.add("a", tokens=1)
    driven.step()
    boards.begin("rollout", running=3)
    driven.add("b", tokens=1)
    driven.step()
    state = driven.scheduler.state
    assert (state.finished, state.finished_lending) == (2, 1)
    driven.add("of a client that hangs up")
    driven.step()
    driven.scheduler.finish_requests(list(driven.scheduler.requests), abort())
    assert (state.aborted, state.finished) == (1, 2) and state.hold_until == board.INFINITE


def test_first_tokens_beyond_their_median_target_leave_rollouts_less(driven, monkeypatch, clock):
    monkeypatch.setattr(slo, "FORGET_S", 1e6)
    shares = []
    for late_s in (0.3, 0.0):  # of a median target of 0.2 s, within ttft_p99_s
        for i in range(60):
            driven.add(f"{late_s}-{i}", prompt=20, tokens=1)
            driven.scheduler._seen[f"{late_s}-{i}"].arrival -= late_s
            driven.step()
        driven.scheduler._publish()
        shares.append(driven.scheduler.state.prompt_share)
    assert shares[0] < 0.02 and shares[1] == 1


def test_an_engine_that_misses_its_targets_alone_lends_only_while_idle(driven, clock):
    def lends():
        clock[0] += slo.IDLE_S + 1.0
        driven.scheduler._publish()
        return driven.scheduler.state.lends

    for _ in range(slo.JUDGED):
        driven.scheduler._attainment.add(clock[0], 9.0, None, lent=False)
    assert lends() == 1
    driven.add("a", tokens=1)
    assert lends() == lends() == 0
    driven.step()
    assert lends() == 1


def test_requests_that_lose_their_memory_to_others_are_counted(driven):
    for name in "abc":
        driven.add(name, prompt=250, tokens=250)  # 32 blocks each in the end, of 64
    driven.steps(600)
    assert driven.scheduler.state.preempted > 0 and driven.made == dict.fromkeys("abc", 250)


def test_a_whole_step_of_prompts_finds_memory_though_all_else_is_lent(driven, boards):
    driven.add("a", prompt=32, tokens=200)
    boards.begin("rollout")
    driven.step()
    state, pool = driven.scheduler.state, driven.scheduler.pool
    boards.set("rollout", kv_budget=TOTAL - state.kv_held)
    driven.add("b", prompt=128, tokens=20)
    driven.add("c", prompt=127, tokens=20)
    assert driven.step() == {"a": 1, "b": 128, "c": 127}, "256 tokens are a step"
    assert pool.limit_bytes <= TOTAL - boards.writers["rollout"].state.kv_budget


def test_rollouts_are_left_alone_while_only_the_reserve_is_missing(driven, boards, monkeypatch):
    lifted = []
    monkeypatch.setattr(online, "restore_priority", lifted.append)
    boards.begin("rollout", kv_budget=0.7 * TOTAL)
    driven.add("a", prompt=200, tokens=200)
    driven.step()
    driven.add("b", prompt=60, tokens=20)
    driven.scheduler._on_beat()
    assert driven.scheduler._needed() > 0.3 * TOTAL and not lifted
    driven.add("c", prompt=200, tokens=20)
    driven.scheduler._on_beat()
    assert lifted == [os.getpid()]


def test_it_uses_lent_memory_after_its_return_and_preempts_nothing_meanwhile(driven, boards):
    boards.begin("rollout", kv_budget=0.8 * TOTAL)
    driven.add("a", prompt=32, tokens=200)
    driven.step()
    state, pool = driven.scheduler.state, driven.scheduler.pool
    driven.add("b", prompt=400, tokens=20)
    assert "b" not in driven.step() or pool.limit_bytes <= 0.2 * TOTAL
    assert state.kv_wanted > 0.4 * TOTAL and pool.limit_bytes <= 0.2 * TOTAL
    boards.set("rollout", kv_budget=0.2 * TOTAL)
    driven.steps(3)
    assert pool.limit_bytes > 0.5 * TOTAL and state.running == 2 and state.preempted == 0


@pytest.fixture
def four_at_once(monkeypatch):
    for module in (pool, online):
        monkeypatch.setattr(module, "AT_ONCE", 4 * 4096)


def changes(driven, step) -> tuple[int, int]:
    """Blocks that lose their memory, and get some, meanwhile."""
    driven.calls.clear()
    step()
    return tuple(
        sum(len(ids) for method, ids in driven.calls if method == name)
        for name in (pool.RELEASE, pool.MAP)
    )


def test_while_requests_run_memory_changes_hands_in_parts(driven, boards, four_at_once):
    scheduler = driven.scheduler
    assert scheduler.pool.limit_bytes == TOTAL, "nobody waits at the start"
    driven.add("a", prompt=32, tokens=200)
    driven.step()
    boards.begin("rollout")
    given = [changes(driven, driven.step) for _ in range(20)]
    # "a" grows by a block in between
    assert all(lost <= 4 and got <= 1 for lost, got in given) and given[0] == (4, 0)
    needed = scheduler._needed()
    # Not a part of it is kept for the delay.
    assert needed <= scheduler.pool.limit_bytes <= needed + scheduler._reserve
    boards.set("control", lend=0)
    taken = [changes(driven, driven.step) for _ in range(20)]
    assert all(got <= 4 and not lost for lost, got in taken) and taken[0] == (0, 4)
    assert scheduler.pool.limit_bytes == TOTAL


def test_what_the_next_step_needs_is_there_at_once(driven, boards, four_at_once):
    driven.add("a", prompt=32, tokens=200)
    boards.begin("rollout")
    driven.steps(20)
    had = driven.scheduler.pool.limit_bytes
    for name in "bcd":
        driven.add(name, prompt=200, tokens=20)
    scheduled = []
    lost, got = changes(driven, lambda: scheduled.append(driven.step()))
    assert scheduled == [{"a": 1, "b": 200, "c": 55}], "256 tokens are a step"
    assert not lost and 0 < got < 30 and driven.scheduler.pool.limit_bytes - had == got * 4096
    driven.steps(5)
    assert driven.scheduler.state.running == 4 and not driven.scheduler.state.preempted


def test_without_requests_the_beat_has_the_rest_change_hands(driven, boards, four_at_once):
    boards.begin("rollout")
    for lend in (1, 0):
        boards.set("control", lend=lend)
        turns = 0
        while driven.scheduler._wants_loop():
            assert max(changes(driven, driven.step)) <= 4
            turns += 1
        assert 5 < turns < 16 and (driven.scheduler.pool.limit_bytes == TOTAL) != lend


@pytest.fixture
def lender(boards):
    """A living rollout engine's process, whose board has most of the memory."""
    process = subprocess.Popen(["sleep", "600"])
    started = board._started(process.pid)
    boards.begin("rollout", kv_budget=0.8 * TOTAL, pid=process.pid, pid_started=started)
    yield process
    process.kill()
    process.wait(60)


def test_memory_of_a_dead_engine_is_taken_of_a_damaged_board_not(driven, boards, lender):
    driven.add("a", prompt=400, tokens=100)
    driven.step()
    assert driven.scheduler.pool.limit_bytes <= 0.2 * TOTAL
    boards.damage("rollout")
    driven.step()
    assert driven.scheduler.pool.limit_bytes <= 0.2 * TOTAL
    lender.kill()
    lender.wait(60)
    driven.step()
    assert driven.scheduler.pool.limit_bytes > 0.3 * TOTAL


def test_a_rollout_engine_that_keeps_what_requests_wait_for_is_ended(driven, lender):
    driven.add("a", prompt=400, tokens=100)
    driven.step()
    driven.scheduler._on_beat()
    assert lender.poll() is None
    driven.scheduler._asked_at -= driven.scheduler._lending.revoke_after_s
    driven.scheduler._on_beat()
    assert lender.wait(60) == -signal.SIGKILL
    driven.step()
    assert driven.scheduler.pool.limit_bytes > 0.3 * TOTAL


def test_without_a_device_it_is_vllms_and_logs_its_steps(make_scheduler, monkeypatch, tmp_path):
    monkeypatch.delenv("ROSE_COSERVING", raising=False)
    monkeypatch.setenv("ROSE_COSERVING_STEPS", str(tmp_path / "steps"))
    driven = make_scheduler("rose.parts.lending.vllm.online")
    driven.add("a", prompt=20, tokens=3)
    driven.steps(3)
    lines = [msgspec.json.decode(line) for line in (tmp_path / "steps").read_bytes().splitlines()]
    assert [line["prefill"] for line in lines] == [[[20, 0]], [], []]
    assert [line["decode_context"] for line in lines] == [0, 20, 21]
    assert all(line["began"] < line["ended"] for line in lines) and driven.ended["a"][0] == "LENGTH"


def test_beside_a_step_in_flight_memory_moves_seldom_and_little(driven, boards, monkeypatch, clock):
    monkeypatch.setattr(online, "IN_FLIGHT", 2 * 4096)
    driven.add("a", prompt=32, tokens=200)
    driven.plan()
    boards.begin("rollout")
    scheduler = driven.scheduler
    assert [changes(driven, scheduler._share_memory)[0] for _ in range(3)] == [2, 0, 0]
    clock[0] += 2 * online.MOVE_EVERY_S
    assert changes(driven, scheduler._share_memory) == (2, 0)
    driven.done()
    assert changes(driven, scheduler._share_memory)[0] > 30, "all of it while no step runs"
    driven.plan()
    driven.add("b", prompt=450, tokens=20)
    assert changes(driven, scheduler._share_memory)[1] > 0, "what requests need comes at once"
