"""The stop flag in both engines' schedulers: when it is raised, and when it is ignored."""

import time

import msgspec
import pytest

from rose.engine import plugin
from rose.parts.lending.flag import Flag
from rose.parts.lending.rules.gate import Reason
from rose.parts.lending.vllm import stopped

pytestmark = pytest.mark.slow  # imports vLLM
TOTAL = 64 * 4096


@pytest.fixture
def flag(boards):
    return Flag(boards.folder)


@pytest.fixture
def online(boards, make_scheduler):
    boards.begin("control", lend=1, share=1)
    return make_scheduler("rose.parts.lending.vllm.online")


@pytest.fixture
def rollouts(boards, make_scheduler):
    boards.begin("online", kv_total=TOTAL, kv_held=TOTAL // 10)
    boards.begin("control", lend=1, share=1, epoch=1)
    return make_scheduler("rose.parts.lending.vllm.rollout")


@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_flag_is_up_from_the_first_step_of_requests_to_their_end(online, flag, asynchronous):
    scheduler = online.scheduler
    scheduler._dial.lets = lambda *_: False
    assert not flag.up
    online.add("a", prompt=40, tokens=4)
    assert not flag.up
    seen = []
    for _ in range(8):
        online.plan()
        seen.append(flag.up)
        if not asynchronous or len(online.in_flight) == 2:
            online.done()
            seen.append(flag.up)
    assert seen[:4] == [True] * 4 and not flag.up
    scheduler._flag.up = True  # the engine was idle all the while
    scheduler._on_beat()
    assert not flag.up


def test_rollouts_run_beside_the_steps_that_the_dial_allows(online, flag):
    scheduler = online.scheduler
    scheduler._slo = msgspec.structs.replace(scheduler._slo, tpot_p99_s=1000.0)
    asked = []
    scheduler._dial.lets = lambda *words: bool(asked.append(words)) or len(asked) % 2 == 0
    online.add("a", prompt=40, tokens=6)
    online.plan()
    seen = [flag.up]
    while online.in_flight:
        online.done()
        if scheduler.has_unfinished_requests():
            online.plan()
            seen.append(flag.up)
    assert seen == [True, False] * 3
    (prompt, *_), (decode, decode_s, left_s) = asked[:2]
    assert prompt.prefill and decode.decodes == 1 and decode_s > 0 and left_s > 0
    assert 0 < scheduler.state.shared_s < scheduler.state.busy_s


def test_the_dial_counts_what_passes_between_two_tokens_also_outside_of_steps(online):
    paces = []
    online.scheduler._dial.decoded = paces.append
    online.add("a", prompt=40, tokens=3)
    online.step()
    assert paces == []
    time.sleep(0.1)
    online.step()
    assert len(paces) == 1 and paces[0] > 0.1


def test_an_operator_who_switches_stops_off_never_finds_the_flag_up(online, flag, boards):
    boards.set("control", stops=0)
    online.add("a", prompt=40, tokens=6)
    online.plan()
    assert not flag.up
    boards.set("control", stops=1)
    online.done()
    online.plan()
    assert flag.up


def test_while_requests_wait_for_memory_the_flag_is_down(online, flag, boards):
    """A stopped rollout step may keep the memory: neither engine would go on."""
    scheduler = online.scheduler
    scheduler._dial.lets = lambda *_: False
    boards.begin("rollout", kv_budget=0.8 * TOTAL)
    online.add("a", prompt=32, tokens=200)
    online.step()
    online.plan()
    assert flag.up
    online.add("b", prompt=400, tokens=20)
    scheduler._on_beat()
    assert not flag.up, "at once, and not only at the next step"
    online.done()
    assert "b" not in online.plan() or scheduler._waits_for_memory()
    assert not flag.up
    boards.set("rollout", kv_budget=0.1 * TOTAL)
    online.done()
    online.plan()
    assert flag.up and not scheduler._waits_for_memory()
    boards.set("rollout", kv_budget=0)
    for name in "cdef":
        online.add(name, prompt=400, tokens=20)
    online.done()
    online.plan()
    assert scheduler.waiting and flag.up, "short of memory of its own it computes alone"


def test_a_revoked_budget_ends_a_stopped_step_before_memory_is_released(rollouts, boards, flag):
    """The release waits for the step in flight, which waits for the flag."""
    scheduler, ignored = rollouts.scheduler, []
    call = scheduler.pool._call
    scheduler.pool._call = lambda *words: ignored.append(flag.ignored) or call(*words)
    rollouts.add("a", prompt=150, tokens=100)
    rollouts.plan()
    scheduler._on_beat()
    assert not flag.ignored
    boards.set("online", kv_used=0.9 * TOTAL, kv_wanted=0.9 * TOTAL, kv_held=0.9 * TOTAL)
    scheduler._on_beat()
    assert flag.ignored, "the engine's loop may wait for the step"
    rollouts.done()
    scheduler._flag.ignored, ignored[:] = False, []
    rollouts.plan()
    assert ignored and all(ignored)
    scheduler._on_beat()
    assert not flag.ignored


def test_a_call_into_the_engine_waits_for_a_stopped_step_for_a_moment_only(
    rollouts, flag, monkeypatch
):
    from vllm.v1.core.sched.interface import PauseState
    from vllm.v1.engine import EngineCoreRequestType

    flag.up, scheduler = True, rollouts.scheduler
    monkeypatch.setattr(stopped, "CALL_S", 0.0)
    rollouts.add("a")
    queue, kinds = scheduler._core.input_queue, EngineCoreRequestType
    for kind, goes_on in ((kinds.ADD, False), (kinds.UTILITY, True), (kinds.ABORT, True)):
        rollouts.plan()
        queue.put((kind, None))
        scheduler._on_beat()
        assert flag.may_go is goes_on, kind
        queue.get()
        scheduler._on_beat()
        assert flag.may_go is goes_on, "vLLM may carry out what it took after the step only"
        rollouts.done()
        rollouts.plan()
        scheduler._on_beat()
        assert not flag.may_go, "the next one stops again"
        rollouts.done()
    rollouts.plan()
    scheduler._core._idle_state_callbacks = [print]
    scheduler._on_beat()
    assert not flag.may_go, "until all requests have ended: that takes more than this step"
    scheduler.set_pause_state(PauseState.PAUSED_ALL)
    scheduler._on_beat()
    assert flag.may_go, "until no step is in flight"


def test_a_step_that_was_planned_ahead_is_let_go_with_the_first(rollouts, flag, monkeypatch):
    from vllm.v1.engine import EngineCoreRequestType

    flag.up, scheduler = True, rollouts.scheduler
    scheduler._most = 16  # a third of the prompt
    rollouts.add("a", prompt=48)
    rollouts.plan()
    rollouts.plan()
    assert len(scheduler._in_flight) == 2
    scheduler._on_beat()
    assert not flag.may_go
    monkeypatch.setattr(stopped, "CALL_S", 0.0)
    scheduler._core.input_queue.put((EngineCoreRequestType.UTILITY, None))
    scheduler._on_beat()
    scheduler._core.input_queue.get()
    rollouts.done()
    scheduler._on_beat()
    assert flag.may_go
    rollouts.plan()
    rollouts.done()
    scheduler._on_beat()
    assert not flag.may_go, "a step that was planned later"


def test_turns_whose_steps_are_stopped_for_long_are_returned(rollouts, boards, flag, monkeypatch):
    flag.up, scheduler = True, rollouts.scheduler
    rollouts.add("a")
    rollouts.plan()
    scheduler._on_beat()
    assert not flag.may_go and scheduler.state.open
    monkeypatch.setattr(stopped, "SHUT_S", 0.0)
    scheduler._on_beat()
    assert not scheduler.state.open and scheduler.state.shut_by == Reason.DEVICE_BUSY
    scheduler._stopped.free_at -= scheduler._lending.patience_s
    scheduler._stopped.came_at -= scheduler._lending.patience_s
    scheduler._on_beat()
    assert flag.may_go
    rollouts.done()
    rollouts.step()
    assert rollouts.ended == {"a": ("ABORT", plugin.EVICTED)}
    assert scheduler.state.shut_by == Reason.DEVICE_BUSY
    scheduler._on_beat()
    assert not flag.may_go
    rollouts.add("b")  # It finds out whether the device is busy still, and is not evicted for that.
    rollouts.plan()
    scheduler._on_beat()
    assert not flag.may_go and not scheduler.state.open and "b" not in rollouts.ended
    flag.up = False
    scheduler._on_beat()
    assert scheduler.state.open, "before the step has ended"


def test_a_flag_that_a_silent_engine_left_up_is_ignored(rollouts, boards, flag):
    flag.up, scheduler = True, rollouts.scheduler
    rollouts.add("a")
    rollouts.plan()
    scheduler._on_beat()
    assert not flag.may_go
    boards.close()
    scheduler._lending = msgspec.structs.replace(scheduler._lending, stale_after_s=0.01)
    time.sleep(0.02)
    scheduler._on_beat()
    assert flag.may_go
