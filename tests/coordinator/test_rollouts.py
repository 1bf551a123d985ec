"""Groups come and go at any time: each trajectory is started, counted, cancelled and forgotten
once."""

from types import SimpleNamespace

import pytest

from rose import protocol as p
from rose.coordinator import control, journal
from rose.coordinator.waiting import RunFailed
from rose.scheduler import events as ev
from tests import made
from tests.coordinator.conftest import HOST, of_hosts, request, started

SIZE = 2


@pytest.fixture
def rollouts(world, make_config):
    sizes = f"rollout.group_size={SIZE} trainer.batch_size=8"
    return of_hosts(make_config(sizes, "env.max_failures_in_row=3"), world, [HOST])


def arrived(name, tokens=3, phase=p.Phase.TRAIN):
    return p.TrajectoryFinished(made.trajectory(name, phase=phase, response_tokens=tokens))


def failed(name, error="boom", domain="frozen_lake", **more):
    return p.TrajectoryFailed(name, name.partition(".")[0], domain, error, **more)


def test_each_members_bounds_of_failures_are_its_own(world, make_config):
    sizes = f"rollout.group_size={SIZE} trainer.batch_size=8"
    made = make_config("env=games", sizes, "env.members.calculator.max_failures_in_row=2")
    rollouts = of_hosts(made, world, [HOST])
    for index in range(100):
        rollouts.admit(index, f"g{index}", 0.0)
    starts = [m for _, m in world.taken(p.StartTrajectory) if m.domain == "calculator"]
    with pytest.raises(RunFailed, match=r"env\.members\.calculator\.max_failed_tasks=0\.2"):
        for start in starts:
            rollouts.handle(failed(start.id, domain="calculator"))
    assert rollouts.groups.failed == 2 * (rollouts.groups.given_up + 1) > 2


def events(world):
    """The journal's events."""
    world.journal.flush()
    return [entry.event for entry in list(journal.read(world.journal_path))[1:]]


def test_staleness_counts_the_versions_since_admission_of_groups_that_are_taken(rollouts, world):
    for index in range(2):
        rollouts.admit(index, f"g{index}", 0.0)
        world.hub.weights.publish(index + 1, "store")
    for name in ("g0.0", "g0.1", "g1.1", "g1.0"):
        rollouts.handle(arrived(name))
    assert [t.id for t in rollouts.take(["g1"])[0]] == ["g1.0", "g1.1"]
    assert rollouts.staleness_max == 1 and list(rollouts.finished) == ["g0"]
    rollouts.begin_step(8)
    assert rollouts.progress == (SIZE, 8), "what is there already counts for the next step"
    rollouts.take(["g0"])
    assert rollouts.staleness_max == 2


def test_what_is_dropped_is_counted_with_the_tokens_of_turns_that_still_run(rollouts, world):
    rollouts.admit(3, "g3", 0.0)
    rollouts.handle(arrived("g3.0", tokens=7))
    world.request("g3.1.t0")
    world.progress([4, 5], turn="g3.1.t0")
    rollouts.drop("g3")
    assert (rollouts.counts.groups_dropped, rollouts.counts.tokens_dropped) == (1, 9)
    assert world.taken(p.CancelTrajectory) == [(HOST, p.CancelTrajectory("g3.1"))]
    assert [m for _, m in world.taken(p.AbortTurn)] == [p.AbortTurn("g3.1.t0", 1)]
    rollouts.begin_step(8)
    assert (rollouts.counts.groups_dropped, rollouts.counts.tokens_dropped) == (0, 0)


def test_late_words_about_a_cancelled_trajectory_reach_nobody(rollouts, world):
    rollouts.admit(3, "g3", 0.0)
    rollouts.drop("g3")
    before = events(world)
    assert rollouts.handle(arrived("g3.0")) and rollouts.handle(failed("g3.1"))
    assert rollouts.handle(request("g3.0.t1")), "the turn hub would open it"
    assert events(world) == before and rollouts.finished == {} and world.faults == []


def test_a_second_try_has_members_of_its_own_name(rollouts, world):
    rollouts.admit(12, "g12", 0.0)
    first = {m.id: m.env_seed for _, m in world.taken(p.StartTrajectory)}
    rollouts.drop("g12")
    rollouts.admit(12, "g12r1", 0.0)
    second = {m.id: m.env_seed for _, m in world.taken(p.StartTrajectory)}
    assert list(second) == ["g12r1.0", "g12r1.1"] and set(first.values()) == set(second.values())
    for name, again in (("g12r1.1", "g12r1.1r1"), ("g12r1.1r1", "g12r1.1r2")):
        rollouts.handle(failed(name))
        assert started(world) == {again: HOST}


def test_a_task_that_is_given_up_leaves_nothing_and_its_group_begins_again(rollouts, world):
    rollouts.admit(9, "g9", 0.0)
    world.taken(p.StartTrajectory)
    rollouts.handle(failed("g9.0", certain=True))
    assert world.taken(p.CancelTrajectory) == [(HOST, p.CancelTrajectory("g9.1"))]
    assert rollouts.groups.running == SIZE and not rollouts.runs("g9.1")
    rollouts.drop("g9")
    world.taken(p.StartTrajectory), world.faults.clear()
    rollouts.begin_step(SIZE)
    rollouts.admit(0, "g0", 0.0)
    [seed] = {m.env_seed for _, m in world.taken(p.StartTrajectory)}
    rollouts.handle(arrived("g0.1", tokens=5))
    assert rollouts.progress == (1, SIZE)
    for name in ("g0.0", "g0.0r1", "g0.0r2"):
        rollouts.handle(failed(name, f"boom {name}"))
    starts = [m for _, m in world.taken(p.StartTrajectory)][-SIZE:]
    assert {m.group for m in starts} == {"g0"} and seed not in {m.env_seed for m in starts}
    [(_, words)] = [fault for fault in world.faults if fault[0] == "task given up"]
    assert f"frozen_lake with seed {seed}" in words and "boom g0.0r2" in words
    assert rollouts.groups.given_up == 2 and rollouts.progress == (0, SIZE)
    assert rollouts.counts.tokens_dropped == 5
    for start in starts:
        rollouts.handle(arrived(start.id))
    [whole] = rollouts.take(["g0"])
    assert [t.id for t in whole] == [m.id for m in starts]
    assert sum(isinstance(event, ev.GroupFinished) for event in events(world)) == 1


def test_a_group_that_its_last_trajectorys_end_has_dropped_does_not_finish(rollouts, world):
    rollouts.admit(0, "g0", 0.0)
    rollouts.handle(arrived("g0.0"))
    handle = world.scheduler.handle

    def drops(event):
        dropped = [ev.DropGroup("g0")] if isinstance(event, ev.TrajectoryEnded) else []
        return handle(event) + dropped

    world.scheduler.handle = drops
    world.hub._on_action = lambda action: rollouts.drop(action.group)
    rollouts.handle(arrived("g0.1"))
    assert rollouts.finished == {} and rollouts.counts.tokens_dropped == 6
    assert not any(isinstance(event, ev.GroupFinished) for event in events(world))


def test_after_the_last_step_nothing_runs_and_nothing_is_admitted(rollouts, world):
    rollouts.admit(0, "g0", 0.0)
    rollouts.evaluate({"e5-0": (control.Task("frozen_lake", 3), 1)}, waited_for=True)
    world.taken(p.StartTrajectory)
    rollouts.stop()
    cancelled = [m.id for _, m in world.taken(p.CancelTrajectory)]
    assert cancelled == ["g0.0", "g0.1"], "the evaluation goes on"
    rollouts.admit(1, "g1", 0.0)
    assert world.taken(p.StartTrajectory) == [] and rollouts.groups.running == 1
    rollouts.handle(arrived("e5-0.0", phase=p.Phase.EVAL))
    assert rollouts.progress == (1, 1) and list(rollouts.finished) == ["e5-0"]


def test_what_forks_off_a_trajectory_is_started_on_the_same_host(world, make_config):
    sizes = "rollout.group_size=8 trainer.batch_size=8 rollout.environment_hosts=3"
    config = make_config(sizes, "rollout/branch=tree rollout.branch.at=[1,2]")
    rollouts = of_hosts(config, world, [1, 2, 3])
    for index in range(12):
        rollouts.admit(index, f"g{index}", 0.0)
    starts = {m.id: (rank, m.follows) for rank, m in world.taken(p.StartTrajectory)}
    assert len(starts) == 96 and {rank for rank, _ in starts.values()} == {1, 2, 3}
    for rank, follows in starts.values():
        assert not follows or starts[follows][0] == rank


def test_a_part_hears_of_each_group_that_is_complete_or_dropped(world, rollouts):
    ended, events = [], []
    world.hub.listener = SimpleNamespace(observe=events.append, group_ended=ended.append)
    for index in range(3):
        rollouts.admit(index, f"g{index}", 0.0)
    world.request()
    world.finish([4])
    rollouts.handle(arrived("g0.0"))
    assert ended == [] and ev.TurnEnded in map(type, events)
    rollouts.handle(arrived("g0.1"))
    rollouts.drop("g1")
    assert ended == ["g0", "g1"]
