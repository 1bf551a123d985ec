"""Which workers ROSE, RLBoost, Libra and the serverless policy use, and when."""

import itertools
from random import Random

import pytest

from rose.parts.rivals.libra import Measured, makespan
from rose.policies.ours import CALM
from rose.scheduler import events as ev
from tests.scheduler.said import asked, built, joined, lends
from tests.scheduler.test_refusals import ROSE


def make(provisioning, **args):
    s = built(1e9, provisioning=(provisioning, args))
    s.handle(ev.VersionPublished(at=0.0, version=0))
    return s


def join(s, name, kind, at=0.0, kv=1000):
    return s.handle(joined(name, 8, kv, kind, at))


def lend(s, name, kv, at=0.0):
    s.handle(lends(name, kv, at=at))


def begin(s, step, at):
    return s.handle(ev.StepBegun(at=at, step=step, groups=1))


def finish(s, step, at, tokens=1000):
    """End the step's only group, so that training begins; return the actions."""
    s.handle(ev.TrajectoryEnded(at=at, trajectory=f"g{step}.0", tokens=tokens))
    actions = s.handle(ev.GroupFinished(at=at, group=f"g{step}", accepted=True))
    assert any(isinstance(a, ev.StartTraining) for a in actions)
    return actions


def publish(s, version, at):
    s.handle(ev.VersionPublished(at=at, version=version))
    load(s, version, at)


def load(s, version, at):
    for name, worker in s.cluster.workers.items():
        if worker.loading:
            s.handle(ev.WorkerLoaded(at=at, worker=name, version=version))


def work(s, count, at=0.0, prefix="g0"):
    for i in range(count):
        s.handle(asked(f"{prefix}.{i}.t0", at))


def used(s, kind="cooperative"):
    return [n for n, w in sorted(s.cluster.workers.items()) if w.kind == kind and not w.resting]


def rose(kv=(900, 500, 700, 800), **args):
    s = make("rose", **ROSE | args)
    join(s, "d", "dedicated")
    for name, tokens in zip("wxyz", kv, strict=False):
        join(s, name, "cooperative")
        lend(s, name, tokens)
    return s


def test_rose_uses_at_most_its_cap_of_workers_ranked_by_recent_use_not_by_current_use():
    s = rose()
    assert used(s) == []
    begin(s, 0, 100.0)
    assert used(s) == ["w", "z"], "the least KV use first"
    lend(s, "x", 1000, at=199.0)  # idle for one second
    lend(s, "z", 690, at=150.0)  # busier than y, but by less than the hysteresis
    begin(s, 1, 200.0)
    assert used(s) == ["w", "z"]
    lend(s, "z", 100, at=201.0)
    begin(s, 2, 300.0)
    assert used(s) == ["w", "x"]


def test_rose_replaces_a_lost_worker_only_while_enough_of_the_step_is_left():
    s = rose()
    begin(s, 0, 0.0), work(s, 20)
    s.handle(ev.WorkerLost(at=1.0, worker="w", reason="gone"))
    s.handle(ev.Tick(at=1.0))
    assert used(s) == ["y", "z"], "the length of a step isn't known yet"
    finish(s, 0, 90.0), publish(s, 1, 95.0), begin(s, 1, 100.0)
    s.handle(ev.WorkerLost(at=150.0, worker="z", reason="gone"))
    s.handle(ev.Tick(at=150.0))
    assert used(s) == ["x", "y"], "50 s left / 3 > 5 s"
    join(s, "w", "cooperative", at=190.0)
    s.handle(ev.WorkerLost(at=190.0, worker="y", reason="gone"))
    s.handle(ev.Tick(at=190.0))
    assert used(s) == ["x"]


def test_rose_releases_idle_workers_in_the_tail_and_uses_them_again_in_the_next_step():
    s = rose()
    begin(s, 0, 0.0)
    work(s, 20)
    for i in range(2, 20):
        s.handle(ev.TurnEnded(at=1.0, turn=f"g0.{i}.t0", tokens=5))
    for at in range(1, 60):
        s.handle(ev.Tick(at=float(at)))
    assert len(used(s)) < 2 and all(s.cluster.workers[n].turns for n in used(s))
    finish(s, 0, 60.0), publish(s, 1, 65.0), begin(s, 1, 70.0)
    assert used(s) == ["w", "z"]


def rlboost(spot=1, **args):
    s = make("rlboost", **{"initial_s": 30.0, "minimum_s": 5.0} | args)
    join(s, "h", "hybrid")
    for i in range(spot):
        join(s, f"s{i}", "spot")
    return s


def step(s, number, at, rollout_s, train_s, tokens=1000):
    """Run a step with a tick per second; return the second at which the hybrid worker rested."""
    begin(s, number, at)
    load(s, s.cluster.version, at)
    work(s, 4, at, f"g{number}")
    rested = None
    for second in range(int(rollout_s)):
        s.handle(ev.Tick(at=at + second))
        if rested is None and not used(s, "hybrid"):
            rested = second
    for i in range(4):
        s.handle(ev.TurnEnded(at=at + rollout_s, turn=f"g{number}.{i}.t0", tokens=10))
    finish(s, number, at + rollout_s, tokens)
    assert used(s, "hybrid") == []
    publish(s, s.cluster.version + 1, at + rollout_s + train_s)
    return rested


def test_rlboost_uses_hybrid_workers_for_a_window_then_their_turns_move_to_spot_workers():
    s = rlboost()
    begin(s, 0, 0.0), work(s, 4)
    moved = list(s.cluster.workers["h"].turns)
    assert moved and used(s, "hybrid") == ["h"]
    actions = s.handle(ev.Tick(at=30.0))
    assert ev.RestWorker("h") in actions
    assert {a.turn for a in actions if isinstance(a, ev.AbortTurn)} == set(moved)
    assert {a.turn for a in actions if isinstance(a, ev.AssignTurn)} == set(moved)


def test_rlboost_balances_the_waits_by_a_third_of_their_difference():
    s = rlboost()
    assert step(s, 0, 0.0, 90, 30) == 30, "the trainer waits 60 s, the rollouts 30 s"
    assert step(s, 1, 120.0, 90, 30) == 40
    assert step(s, 2, 240.0, 90, 30) == 47, "40 s and a third of 50 s - 30 s"


def test_rlboost_returns_to_the_best_window_for_this_number_of_spot_workers():
    s = rlboost()
    step(s, 0, 0.0, 90, 30), step(s, 1, 120.0, 90, 30, tokens=2000)
    join(s, "s1", "spot", at=240.0)
    assert step(s, 2, 240.0, 60, 30) == 47
    s.handle(ev.WorkerLost(at=330.0, worker="s1", reason="preempted"))
    assert step(s, 3, 330.0, 90, 30) == 30, "the best window with one spot worker"


def serverless(**args):
    times = {"keep_alive_s": 10.0, "back_off_s": 60.0}
    return make("serverless", **{"max": 3, "turns_per_worker": 4} | times | args)


def test_serverless_requests_at_once_what_the_turns_need_up_to_its_maximum():
    s = serverless()
    work(s, 5)
    assert s.handle(ev.Tick(at=1.0)) == [ev.RequestCapacity("lend-1"), ev.RequestCapacity("lend-2")]
    work(s, 30, prefix="g1")
    assert s.handle(ev.Tick(at=2.0)) == [ev.RequestCapacity("lend-3")]


def test_serverless_keeps_alive_and_then_releases_the_last_first():
    s = serverless()
    work(s, 12)
    s.handle(ev.Tick(at=0.0))
    for i in range(4, 12):
        s.handle(ev.TurnEnded(at=1.0, turn=f"g0.{i}.t0"))
    assert [s.handle(ev.Tick(at=float(at))) for at in range(1, 10)] == [[]] * 9
    expected = [ev.ReleaseCapacity("lend-3"), ev.ReleaseCapacity("lend-2")]
    assert s.handle(ev.Tick(at=10.0)) == expected


@pytest.mark.parametrize("queued", [False, True])
def test_refusals_of_requests_made_together_count_once_and_pauses_are_bounded(queued):
    """A drained partition refuses all requests, at once or after they have waited."""
    s, at, pauses = serverless(max=7), 0.0, []
    work(s, 28)
    for _ in range(7):
        began = at
        while not (requests := s.handle(ev.Tick(at=at))):
            at += 1.0
        pauses.append(at - began)
        names = [action.request for action in requests]
        assert len(names) == 7
        for name in names:
            if queued:
                s.handle(ev.CapacityQueued(at=at, request=name))
        for number, name in enumerate(names):
            s.handle(ev.CapacityRefused(at=at + number / 2, request=name, reason="drained"))
        at += 3.0
    assert pauses == [0, 60, 120, 240, 300, 300, 300]


LIBRA = {"period_steps": 2, "gain": 0.05, "cost_s": 15.0, "training_workers": 0}


def libra(**args):
    """Return a scheduler with a dedicated worker and three hybrid ones."""
    s = make("libra", **LIBRA | args)
    join(s, "d", "dedicated")
    for i in range(3):
        join(s, f"h{i}", "hybrid")
    return s


def wave(s, number, turns, at, until, tokens):
    """Run turns from `at` until `until`, on as many workers as they need."""
    work(s, turns, at, f"g{number}.{at:g}")
    for second in range(int(at), int(until)):
        s.handle(ev.Tick(at=float(second)))
    for i in range(turns):
        s.handle(ev.TurnEnded(at=until, turn=f"g{number}.{at:g}.{i}.t0", tokens=tokens))
        s.handle(ev.TrajectoryEnded(at=until, trajectory=f"g{number}.{at:g}.{i}", tokens=tokens))


def libra_step(s, number, at, waves, wave_s, training_s, turns=8, tokens=100, period=100.0):
    begin(s, number, at), load(s, s.cluster.version, at)
    for index in range(waves):
        wave(s, number, turns, at + index * wave_s, at + (index + 1) * wave_s, tokens)
    now = at + waves * wave_s
    finish(s, number, now, tokens=0)
    for second in range(int(now), int(now + training_s)):
        s.handle(ev.Tick(at=float(second)))
    publish(s, number + 1, now + training_s)
    for second in range(int(now + training_s), int(at + period)):
        s.handle(ev.Tick(at=float(second)))


@pytest.mark.parametrize(
    ("waves", "training_s", "wanted"),
    [
        # One worker stays with the trainer, however long the rollouts are.
        (40, 1.0, ["h0", "h1"]),
        # Rollout takes 60 s with 1 worker, training 10 s with 3: max(60 / 2, 30 / 2) is smallest
        # with one hybrid worker, the fewest of those that save most.
        (3, 10.0, ["h0"]),
        (1, 60.0, []),  # Training is the longer side, and all hybrid workers train already.
        (1, 10.0, []),  # Rollout takes 20 s; 5 s could be saved, less than a change costs.
    ],
)
def test_libra_moves_as_many_hybrid_workers_as_the_longer_side_needs(waves, training_s, wanted):
    s = libra()
    assert used(s, "hybrid") == []
    for number in range(2):
        libra_step(s, number, number * 1000.0, waves, 20.0, training_s, period=1000.0)
        assert used(s, "hybrid") == [], "nothing is planned before the period is over"
    begin(s, 2, 2000.0)
    assert used(s, "hybrid") == wanted


def test_libra_moves_them_back_when_training_has_become_the_longer_side():
    s = libra()
    for number in range(2):
        libra_step(s, number, number * 100.0, 3, 20.0, 10.0)
    for number in range(2, 4):
        # Two hybrid workers train in 80 s, three would in 53 s.
        libra_step(s, number, number * 100.0, 1, 10.0, 80.0, turns=16)
        assert used(s, "hybrid") == ["h0"]
    begin(s, 4, 400.0)
    assert used(s, "hybrid") == []


@pytest.mark.parametrize("seed", range(5))
def test_libras_cut_is_the_best_of_all_cuts_of_neighbours(seed):
    random = Random(seed)
    lengths = sorted((random.randint(1, 100) for _ in range(9)), reverse=True)
    for workers in (1, 2, 3, 5, 20):
        best = min(max(sum(part) for part in parts) for parts in cuts(lengths, workers))
        expected = pytest.approx(best / 10.0, abs=1e-6)
        assert makespan(Measured(lengths, 10.0, 0.0), workers) == expected


def cuts(lengths, most):
    """Yield all cuts of `lengths` into at most `most` contiguous parts."""
    for count in range(min(most, len(lengths))):
        for at in itertools.combinations(range(1, len(lengths)), count):
            yield [lengths[a:b] for a, b in itertools.pairwise((0, *at, len(lengths)))]


def all_idle(**args):
    s = make("all_idle", **ROSE | {"hybrid_wait_s": 10.0} | args)
    join(s, "d", "dedicated"), join(s, "h", "hybrid"), join(s, "c", "cooperative")
    return s


def test_all_idle_uses_the_trainers_gpus_also_of_one_that_joins_late_until_the_batch_is_complete():
    s = all_idle()
    assert used(s, "hybrid") == []
    begin(s, 0, 0.0), work(s, 8)
    s.handle(ev.WorkerLost(at=1.0, worker="h", reason="killed"))
    assert ev.UseWorker("h") in join(s, "h", "hybrid", at=2.0)
    load(s, 0, 2.0), work(s, 8, prefix="g1")
    assert used(s, "hybrid") == ["h"] and used(s) == ["c"]
    moved = list(s.cluster.workers["h"].turns)
    assert moved
    actions = finish(s, 0, 50.0)
    assert used(s, "hybrid") == []
    assert {a.turn for a in actions if isinstance(a, ev.AbortTurn)} == set(moved)
    join(s, "h", "hybrid", at=51.0)
    assert used(s, "hybrid") == []


def test_all_idle_leaves_its_gpus_to_a_trainer_that_hardly_waits():
    s = all_idle()
    begin(s, 0, 0.0), work(s, 8), finish(s, 0, 5.0), publish(s, 1, 30.0)
    begin(s, 1, 30.0)
    assert used(s, "hybrid") == []
    finish(s, 1, 90.0), publish(s, 2, 120.0), begin(s, 2, 120.0)
    assert used(s, "hybrid") == ["h"]


def two_groups(s, size, second=None):
    """Begin a step of two groups, the second of which has asked for `second` turns; end the first
    at 10 s."""
    s.handle(ev.StepBegun(at=0.0, step=0, groups=2, group_size=size))
    work(s, size, prefix="g0"), work(s, size if second is None else second, prefix="g1")
    for i in range(size):
        end(s, f"g0.{i}", 10.0)
    assert used(s, "hybrid") == ["h"], "no group is in, so few trajectories are no tail"
    s.handle(ev.GroupFinished(at=10.0, group="g0", accepted=True))


def end(s, trajectory, at):
    s.handle(ev.TurnEnded(at=at, turn=f"{trajectory}.t0", tokens=10))
    return s.handle(ev.TrajectoryEnded(at=at, trajectory=trajectory, tokens=10))


def test_all_idle_moves_the_tail_to_other_workers_before_the_batch_is_complete():
    s = all_idle(hybrid_tail=2.0)
    two_groups(s, 5)
    end(s, "g1.0", 11.0), end(s, "g1.1", 12.0)
    assert used(s, "hybrid") == ["h"]
    moved = {turn for turn in s.cluster.workers["h"].turns if not turn.startswith("g1.2")}
    actions = end(s, "g1.2", 13.0)
    assert moved
    assert used(s, "hybrid") == [] and not s.cluster.training
    assert moved == {a.turn for a in actions if isinstance(a, ev.AbortTurn) and a.why == "rest"}
    assert moved == {a.turn for a in actions if isinstance(a, ev.AssignTurn) and a.worker != "h"}
    actions = end(s, "g1.3", 14.0) + end(s, "g1.4", 15.0)
    actions += s.handle(ev.GroupFinished(at=15.0, group="g1", accepted=True))
    assert [type(a) for a in actions if not isinstance(a, ev.AssignTurn)] == [ev.StartTraining]


def test_admitted_trajectories_count_to_the_tail_and_evaluations_do_not():
    s = all_idle(hybrid_tail=2.0)
    work(s, 9, prefix="eval-0")
    two_groups(s, 4, second=2)
    end(s, "g1.0", 11.0)
    assert used(s, "hybrid") == ["h"], "two more have not asked for a turn yet"
    end(s, "g1.1", 12.0)
    assert used(s, "hybrid") == [] and len(s.cluster.group_of) == 9


def test_a_trainer_that_waited_for_its_gpus_has_them_earlier_in_the_next_steps():
    s = all_idle()

    def left_when_it_rests(step, delay):
        at = 100.0 * step
        begun = ev.StepBegun(at=at, step=step, groups=2, group_size=4, hybrid_delay=delay)
        one, other = (a.group for a in s.handle(begun) if isinstance(a, ev.AdmitGroup))
        work(s, 4, prefix=one), work(s, 4, prefix=other)
        assert used(s, "hybrid") == ["h"]
        for i in range(4):
            end(s, f"{one}.{i}", at + 20.0)
        s.handle(ev.GroupFinished(at=at + 20.0, group=one, accepted=True))
        rested = None
        for i in range(4):
            end(s, f"{other}.{i}", at + 30.0)
            if rested is None and not used(s, "hybrid"):
                rested = 3 - i
        s.handle(ev.GroupFinished(at=at + 50.0, group=other, accepted=True))
        publish(s, step + 1, at + 60.0)
        return rested

    delays = (0.0, 0.02, 0.021, 0.0, 0.5)
    expected = [*(None, None), *(1, 1), 2]
    assert [left_when_it_rests(i, delay) for i, delay in enumerate(delays)] == expected


def test_after_many_steps_without_a_wait_the_tail_is_halved_down_to_its_configured_value():
    s, tails = all_idle(hybrid_tail=1.5), []
    for step, delay in enumerate([0.5, 0.5] + [0.02] * 2 * CALM):
        s.handle(ev.StepBegun(at=float(step), step=step, groups=1, hybrid_delay=delay))
        tails.append(s._provisioning.hybrid_tail)
    assert tails == [3.0, 6.0] + [6.0] * (CALM - 1) + [3.0] * CALM + [1.5]
    s = all_idle()
    for step, delay in enumerate([0.5] + [0.0] * CALM):
        s.handle(ev.StepBegun(at=float(step), step=step, groups=1, hybrid_delay=delay))
        tails.append(s._provisioning.hybrid_tail)
    assert tails[-CALM - 1 :] == [1.0] * CALM + [0.0]


def test_a_failed_trajectory_does_not_shorten_the_tail():
    s = all_idle(hybrid_tail=2.0)
    two_groups(s, 4)
    s.handle(ev.TurnEnded(at=11.0, turn="g1.0.t0"))
    s.handle(ev.TrajectoryEnded(at=11.0, trajectory="g1.0"))  # ended, with no tokens
    for i in (1, 2):  # Others take the places of failed trajectories.
        s.handle(ev.TurnEnded(at=12.0, turn=f"g1.{i}.t0"))
        s.handle(ev.TrajectoryEnded(at=12.0, trajectory=f"g1.{i}", failed=True))
    assert used(s, "hybrid") == ["h"], "three are left, and the dedicated worker gets two"
    end(s, "g1.3", 13.0)
    assert used(s, "hybrid") == []
