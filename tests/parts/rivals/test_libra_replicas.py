"""Libra's planner for dedicated workers with replicas: how many train, which workers rest, and what
it remembers, also after a restart."""

import json

import pytest

from rose.config import ConfigError
from rose.scheduler import events as ev
from tests.parts.rivals.test_rival_provisioning import finish, join, load, make, work

PERIOD, TURNS, TOKENS = 2, 6, 100
TRAINED = 600  # tokens of each step
ARGS = {"period_steps": PERIOD, "gain": 0.05, "cost_s": 0.0, "training_workers": 0}


def planner(beside=("d0", "d1"), workers=("d0", "d1", "d2"), **args):
    s = make("libra", **ARGS | args)
    for name in workers:
        join(s, name, "dedicated")
    for name in beside:
        s.handle(ev.ReplicaReady(at=0.0, worker=name))
    return s


def begin(s, step, at, trainers=1):
    """Begin a step, and return its plan in a list, [] if there is none."""
    actions = s.handle(ev.StepBegun(at=at, step=step, groups=1, trainers=trainers))
    return [a for a in actions if isinstance(a, ev.PlanReplicas)]


def published(s, version, at):
    actions = s.handle(ev.VersionPublished(at=at, version=version, tokens=TRAINED))
    load(s, version, at)
    return actions


def resting(s):
    return sorted(name for name, worker in s.cluster.workers.items() if worker.resting)


def step(s, number, at, training_s, rollout_s=10.0, lost=None):
    """Run a step, six turns of `rollout_s` and then training, and return its plan and the workers
    that rested. The replica `lost` dies when training begins, and is ready again at once."""
    plan = begin(s, number, at)
    work(s, TURNS, at, f"g{number}.x")
    for second in range(int(rollout_s)):
        s.handle(ev.Tick(at=at + second))
    now = at + rollout_s
    for i in range(TURNS):
        s.handle(ev.TurnEnded(at=now, turn=f"g{number}.x.{i}.t0", tokens=TOKENS))
        s.handle(ev.TrajectoryEnded(at=now, trajectory=f"g{number}.x.{i}", tokens=TOKENS))
    finish(s, number, now, tokens=0)
    rested = resting(s)
    if lost is not None:
        s.handle(ev.ReplicaLost(at=now, worker=lost))
        s.handle(ev.ReplicaReady(at=now, worker=lost))
    for second in range(int(training_s)):
        s.handle(ev.Tick(at=now + second))
    published(s, number + 1, now + training_s)
    assert resting(s) == [], "with the new version all roll out"
    return plan, rested


def steps(s, first, count, training_s, at=None):
    """Run `count` steps, and return (plans, the workers that rested in each step)."""
    found = []
    for number in range(first, first + count):
        begins = at + (number - first) * (10.0 + training_s)
        found.append(step(s, number, begins, training_s))
    return [p for plans, _ in found for p in plans], [rested for _, rested in found]


def test_as_many_replicas_train_as_minimize_the_longer_side():
    s = planner()
    plans, rested = steps(s, 0, PERIOD, 80.0, at=0.0)
    assert plans == [] and rested == [[], []], "nothing is planned before the period is over"
    [plan], rested = steps(s, PERIOD, PERIOD, 80.0, at=180.0)
    # Rollout: three workers generate 600 tokens in 10 s. Training by 1 + n takes 80, 40, 26.7 s.
    # Rollout with the time that n workers miss: 10, 23.3, 27.8 s.
    assert rested == [["d0", "d1"]] * 2
    assert (plan.step, plan.before, plan.replicas, plan.expected_s) == (2, 0, 2, 0.0)
    assert (plan.step_s, plan.rollout_s, plan.training_s) == pytest.approx((90.0, 10.0, 80.0))
    assert plan.forecast_s == pytest.approx(90.0 * 27.8 / 80, rel=1e-3)


@pytest.mark.parametrize(
    ("training_s", "args"),
    [
        (9.0, {}),  # rollout is the longer side
        (80.0, {"gain": 0.7}),  # 52 of 80 s could be saved
        (80.0, {"cost_s": 53.0}),
        (80.0, {"beside": ("d0",), "workers": ("d0",)}),  # the only engine has to go on
    ],
)
def test_a_split_that_gains_too_little_is_not_taken(training_s, args):
    s = planner(**args)
    steps(s, 0, PERIOD, training_s, at=0.0)
    [plan], rested = steps(s, PERIOD, 1, training_s, at=PERIOD * (10.0 + training_s))
    assert (plan.before, plan.replicas, rested) == (0, 0, [[]])
    assert plan.forecast_s == plan.step_s


@pytest.mark.parametrize(("training_s", "wanted"), [(90.0, 0), (70.0, 2)])
def test_a_split_that_was_tried_is_rated_by_its_measured_time(training_s, wanted):
    """The prediction for two replicas is 26.7 s instead of 80 s. They take longer, or hardly less."""
    s = planner()
    steps(s, 0, PERIOD, 80.0, at=0.0)
    [first], rested = steps(s, PERIOD, PERIOD, training_s, at=180.0)
    assert rested == [["d0", "d1"]] * 2
    [then], rested = steps(s, 2 * PERIOD, 1, training_s, at=180.0 + PERIOD * (10.0 + training_s))
    assert (then.before, then.replicas, then.expected_s) == (2, wanted, first.forecast_s)
    assert len(rested[0]) == wanted
    # A single replica was not tried.
    assert s._provisioning._token_s == pytest.approx({0: 80 / 600, 2: training_s / 600})


def test_workers_with_the_fewest_turns_rest_their_turns_continue_elsewhere_and_one_worker_stays():
    s = planner(beside=("d0", "d1", "d2"), replicas=3)
    begin(s, 0, 0.0)
    work(s, 4, 1.0, "g0.x")
    held = {name: sorted(worker.turns) for name, worker in s.cluster.workers.items()}
    assert sorted(map(len, held.values())) == [1, 1, 2]
    [stays] = [name for name, turns in held.items() if len(turns) == 2]
    moved = [turn for name, turns in held.items() if name != stays for turn in turns]
    actions = finish(s, 0, 2.0)
    assert resting(s) == sorted(set(held) - {stays})
    aborted = [(a.turn, a.why) for a in actions if isinstance(a, ev.AbortTurn)]
    assigned = [(a.turn, a.worker) for a in actions if isinstance(a, ev.AssignTurn)]
    assert sorted(aborted) == [(turn, "rest") for turn in sorted(moved)]
    assert sorted(assigned) == [(turn, stays) for turn in sorted(moved)]
    # Each worker loads the new version once, also those that rested.
    loads = [a for a in published(s, 1, 9.0) if isinstance(a, ev.LoadWeights)]
    assert sorted(a.worker for a in loads) == ["d0", "d1", "d2"] and resting(s) == []


def test_a_worker_that_has_no_replica_or_drains_does_not_rest():
    s = planner(beside=("d0", "d1", "d2"), replicas=2)
    s.handle(ev.ReplicaLost(at=0.5, worker="d0"))
    s.handle(ev.WorkerDraining(at=0.5, worker="d1"))
    begin(s, 0, 1.0)
    finish(s, 0, 2.0)
    assert resting(s) == ["d2"], "d0 rolls out"
    s.handle(ev.WorkerLost(at=3.0, worker="d2", reason="killed"))
    actions = published(s, 1, 4.0)
    assert not [a for a in actions if isinstance(a, ev.UseWorker)], "it is no longer there"
    join(s, "d2", "dedicated", at=5.0)
    begin(s, 1, 6.0)
    finish(s, 1, 7.0)
    assert resting(s) == ["d2"]


def test_a_replica_that_is_down_at_a_plan_is_used_again_when_it_is_back():
    s = planner(replicas=2, gain=1.0)
    steps(s, 0, PERIOD, 80.0, at=0.0)
    s.handle(ev.ReplicaLost(at=180.0, worker="d1"))
    [plan], rested = steps(s, PERIOD, 1, 80.0, at=180.0)
    assert (plan.before, plan.replicas, rested) == (2, 2, [["d0"]])
    s.handle(ev.ReplicaReady(at=280.0, worker="d1"))
    assert steps(s, PERIOD + 1, 1, 80.0, at=280.0)[1] == [["d0", "d1"]]


@pytest.mark.parametrize(("lost", "took_s"), [("d0", 30.0), ("d2", 215.0)])
def test_a_training_that_lost_a_participating_replica_is_not_measured(lost, took_s):
    """The ranks waited for the lost replica and computed its rows, so the time isn't that of the
    split. The loss of a replica that took no part changes nothing."""
    s = planner(beside=("d0", "d1", "d2"))
    steps(s, 0, PERIOD, 80.0, at=0.0)
    assert steps(s, PERIOD, PERIOD - 1, 30.0, at=180.0)[1] == [["d0", "d1"]]
    assert step(s, 2 * PERIOD - 1, 220.0, 400.0, lost=lost)[1] == ["d0", "d1"]
    [plan] = begin(s, 2 * PERIOD, 630.0)
    assert s._provisioning._token_s[2] == pytest.approx(took_s / TRAINED)
    assert plan.training_s == pytest.approx(took_s)
    assert plan.replicas == (2 if lost == "d0" else 0)


def test_a_period_whose_trainings_all_lost_a_replica_plans_nothing():
    s = planner(period_steps=1, replicas=2)
    step(s, 0, 0.0, 400.0, lost="d1")
    assert begin(s, 1, 410.0) == [] and s._provisioning.replicas == 2


def test_times_with_another_number_of_trainer_ranks_are_forgotten_after_a_restart():
    s = planner()
    steps(s, 0, PERIOD, 80.0, at=0.0)
    begin(s, PERIOD, 180.0)
    for trainers, known in ((1, {0: pytest.approx(80 / 600)}), (4, {})):
        again = planner()
        again.restore(json.loads(json.dumps(s.snapshot())))
        begin(again, PERIOD, 180.0, trainers)
        assert again._provisioning._token_s == known and again._provisioning.replicas == 2


def test_a_batch_that_is_complete_before_its_step_trains_by_the_previous_plan():
    s = planner(period_steps=1)
    steps(s, 0, 1, 80.0, at=0.0)
    s.cluster.training = True  # A policy may have the batch when the step begins.
    [plan] = begin(s, 1, 90.0)
    assert plan.step == 2 and plan.replicas == 2


def test_a_restart_continues_with_the_plan():
    s = planner()
    assert "provisioning" not in s.snapshot()
    steps(s, 0, PERIOD, 80.0, at=0.0)
    [plan] = begin(s, PERIOD, 180.0)
    again = planner()
    again.restore(json.loads(json.dumps(s.snapshot())))
    known = again._provisioning
    assert (known.replicas, known._expected_s) == (2, plan.forecast_s)
    assert known._token_s == {0: pytest.approx(80 / 600)}
    begin(again, PERIOD, 180.0)
    finish(again, PERIOD, 200.0)
    assert resting(again) == ["d0", "d1"]
    other = make("fixed")
    other.restore(s.snapshot())
    assert "provisioning" not in other.snapshot()


def test_a_negative_number_of_replicas_is_refused():
    with pytest.raises(ConfigError, match="replicas=-1: of the dedicated workers, 0 or more"):
        planner(replicas=-1)
