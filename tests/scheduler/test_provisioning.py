"""on_demand: when it requests capacity, and when it releases it."""

import pytest

from rose.config import ConfigError
from rose.scheduler import events as ev
from tests.scheduler.said import asked, built
from tests.scheduler.test_refusals import ON_DEMAND


def make(**args):
    return built(provisioning=("on_demand", ON_DEMAND | args))


def tick(s, *seconds):
    """Return the decisions at these seconds, as (second, action)."""
    return [(at, action) for at in seconds for action in s.handle(ev.Tick(at=float(at)))]


def wait(s, at=0.0):
    """Request a turn that no worker can take."""
    s.handle(asked("g.0.t0", at, 1, 1))


def say(s, event, name, at, **more):
    s.handle(event(at=at, request=name, **more))


def test_it_requests_when_turns_have_waited_and_again_after_the_cool_down_up_to_max():
    s = make()
    wait(s)
    expected = [(5, ev.RequestCapacity("lend-1")), (15, ev.RequestCapacity("lend-2"))]
    assert tick(s, *range(40)) == expected


def test_a_short_wait_requests_nothing():
    s = make()
    wait(s)
    assert tick(s, 0, 4) == []
    s.handle(ev.TurnEnded(at=4.0, turn="g.0.t0"))
    assert tick(s, 4) == []
    wait(s, 5.0)
    assert tick(s, 5, 9) == []
    assert tick(s, 10) == [(10, ev.RequestCapacity("lend-1"))]


def test_the_minimum_is_requested_at_once_and_again_when_it_ends():
    s = make(min=2)
    expected = [(0, ev.RequestCapacity("lend-1")), (1, ev.RequestCapacity("lend-2"))]
    assert tick(s, 0, 1, 2) == expected
    say(s, ev.CapacityGranted, "lend-1", 2.0)
    say(s, ev.CapacityEnded, "lend-1", 3.0)
    assert tick(s, 3) == [(3, ev.RequestCapacity("lend-3"))]


def test_idle_capacity_is_released_the_last_first_and_never_the_minimum():
    s = make(min=1)
    wait(s)
    assert len(tick(s, 0, 10)) == 2
    say(s, ev.CapacityGranted, "lend-1", 11.0)
    s.handle(ev.TurnEnded(at=20.0, turn="g.0.t0"))
    assert tick(s, *range(20, 400)) == [(120, ev.ReleaseCapacity("lend-2"))]


def test_each_refusal_in_a_row_doubles_the_pause_until_a_job_has_run():
    s = make(max=1)
    wait(s)
    asked = []
    for at in range(1000):
        for _, action in tick(s, at):
            asked.append(at)
            if len(asked) == 4:
                say(s, ev.CapacityGranted, action.request, at)
                say(s, ev.CapacityEnded, action.request, at)
            else:
                say(s, ev.CapacityQueued, action.request, at)  # granted, never started
                say(s, ev.CapacityRefused, action.request, at, reason="pending")
    pauses = [b - a for a, b in zip(asked, asked[1:], strict=False)]
    assert pauses[:5] == [60, 120, 240, 10, 60]


def test_jobs_of_an_earlier_attempt_count_and_keep_their_names():
    s = make(max=2)
    say(s, ev.CapacityQueued, "lend-1", 0.0)
    wait(s)
    assert tick(s, 0, 5, 30, 60) == [(5, ev.RequestCapacity("lend-2"))]


def test_it_needs_slurm_and_ranks_that_may_join(make_config):
    with pytest.raises(ConfigError, match="cluster=slurm"):
        make_config("scheduler/provisioning=on_demand")
    with pytest.raises(ConfigError, match="serving=borrow"):
        make_config("scheduler/provisioning=on_demand", "cluster=dev", "serving=none")
    assert make_config("scheduler/provisioning=on_demand", "cluster=dev").borrows
