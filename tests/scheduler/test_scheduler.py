"""The scheduler as a pure state machine: events in, actions out."""

import msgspec
import pytest

from rose.config import ConfigError, Policy
from rose.config import Scheduler as SchedulerConfig
from rose.scheduler import build
from rose.scheduler import events as ev

TIMEOUT_S = 60.0


def make(routing="least_loaded", routing_args=None, queue_depth=0.0, **batching):
    return build(SchedulerConfig(
        provisioning=Policy(name="fixed", args={}), routing=Policy(name=routing, args=routing_args or {}),
        order=Policy(name="fifo", args={}), batching=Policy(name="synchronous",
                                                            args={"oversample": 1.0, "max_admitted": 4.0} | batching),
        queue_depth=queue_depth), TIMEOUT_S)


def join(s, name, sequences=4, kv=10_000, version=0, at=0.0):
    return s.handle(ev.WorkerJoined(at=at, worker=name, kind="dedicated", max_sequences=sequences, kv_tokens=kv,
                                    version=version))


def request(s, turn, at=0.0, context=10, new=10):
    group, member, _ = turn.split(".")
    return s.handle(ev.TurnRequested(at=at, turn=turn, trajectory=f"{group}.{member}", group=group,
                                     context_tokens=context, max_new_tokens=new))


def end(s, turn, at=0.0):
    return s.handle(ev.TurnEnded(at=at, turn=turn))


def two_workers(**kwargs):
    s = make(**kwargs)
    s.handle(ev.VersionPublished(at=0.0, version=0))
    join(s, "a"), join(s, "b")
    return s


def assigned(actions):
    return [(a.turn, a.worker, a.attempt) for a in actions if isinstance(a, ev.AssignTurn)]


def test_a_worker_with_old_weights_loads_before_it_gets_a_turn():
    s = make()
    s.handle(ev.VersionPublished(at=0.0, version=3))
    assert join(s, "a", version=-1) == [ev.LoadWeights("a", 3)]
    assert request(s, "g0.0.t0") == []
    assert assigned(s.handle(ev.WorkerLoaded(at=1.0, worker="a", version=3))) == [("g0.0.t0", "a", 1)]


def test_a_version_published_while_loading_is_loaded_next():
    s = make()
    s.handle(ev.VersionPublished(at=0.0, version=1))
    join(s, "a", version=0)
    assert s.handle(ev.VersionPublished(at=1.0, version=2)) == []
    assert s.handle(ev.WorkerLoaded(at=2.0, worker="a", version=1)) == [ev.LoadWeights("a", 2)]


def test_turns_wait_in_order_when_all_workers_are_full():
    s = make()
    s.handle(ev.VersionPublished(at=0.0, version=0))
    join(s, "a", sequences=1)
    assert assigned(request(s, "g0.0.t0")) == [("g0.0.t0", "a", 1)]
    assert request(s, "g0.1.t0") == [] and request(s, "g0.2.t0") == []
    assert assigned(end(s, "g0.0.t0")) == [("g0.1.t0", "a", 1)]


def test_kv_need_bounds_what_a_worker_holds_but_one_turn_always_runs():
    s = make()
    s.handle(ev.VersionPublished(at=0.0, version=0))
    join(s, "a", kv=100)
    assert assigned(request(s, "g0.0.t0", context=500)) == [("g0.0.t0", "a", 1)]
    assert request(s, "g0.1.t0", context=50, new=10) == []
    assert assigned(end(s, "g0.0.t0")) == [("g0.1.t0", "a", 1)]
    assert request(s, "g0.2.t0", context=50, new=10) == []  # 60 + 60 > 100


def test_queue_depth_sends_a_few_turns_ahead():
    s = make(queue_depth=0.5)
    s.handle(ev.VersionPublished(at=0.0, version=0))
    join(s, "a", sequences=2)
    sent = [assigned(request(s, f"g0.{i}.t0")) for i in range(4)]
    assert [len(x) for x in sent] == [1, 1, 1, 0]


def test_turns_of_a_lost_worker_go_elsewhere_in_their_old_order():
    s = two_workers(routing="round_robin")
    for i in range(4):
        request(s, f"g0.{i}.t0")
    actions = s.handle(ev.WorkerLost(at=1.0, worker="a", reason="killed"))
    assert assigned(actions) == [("g0.0.t0", "b", 2), ("g0.2.t0", "b", 2)]


def test_words_of_an_earlier_attempt_do_not_count():
    s = two_workers()
    request(s, "g0.0.t0")
    s.handle(ev.WorkerLost(at=1.0, worker="a", reason="killed"))
    s.handle(ev.TurnProgressed(at=2.0, turn="g0.0.t0", attempt=1, tokens=5))
    assert s.cluster.turns["g0.0.t0"].made_tokens == 0
    s.handle(ev.TurnProgressed(at=2.0, turn="g0.0.t0", attempt=2, tokens=5))
    assert s.cluster.turns["g0.0.t0"].made_tokens == 5


def test_a_turn_without_a_token_until_the_deadline_moves_to_another_worker():
    s = two_workers()
    request(s, "g0.0.t0", at=0.0)
    assert s.handle(ev.Tick(at=TIMEOUT_S)) == []
    assert s.handle(ev.Tick(at=TIMEOUT_S + 1)) == [ev.AbortTurn("g0.0.t0", "a", 1), ev.AssignTurn("g0.0.t0", "b", 2)]
    s.handle(ev.TurnProgressed(at=TIMEOUT_S * 2, turn="g0.0.t0", attempt=2, tokens=1))
    assert s.handle(ev.Tick(at=TIMEOUT_S * 2.5)) == []  # progress counts


def test_a_turn_that_stalls_everywhere_ends_the_run():
    s = two_workers()
    request(s, "g0.0.t0")
    said = [s.handle(ev.Tick(at=(TIMEOUT_S + 1) * k)) for k in range(1, 8)]
    last = [a for actions in said for a in actions if isinstance(a, ev.GiveUp)][0]
    assert "g0.0.t0 stalled 5 times" in last.reason and "rollout.turn_timeout_s" in last.reason


def test_the_same_turn_twice_is_an_error():
    s = two_workers()
    request(s, "g0.0.t0")
    with pytest.raises(ValueError, match="g0.0.t0 was requested twice"):
        request(s, "g0.0.t0")


def test_round_robin_takes_workers_in_turn():
    s = two_workers(routing="round_robin")
    assert [assigned(request(s, f"g0.{i}.t0"))[0][1] for i in range(4)] == ["a", "b", "a", "b"]


def test_least_loaded_weighs_by_capacity():
    s = make()
    s.handle(ev.VersionPublished(at=0.0, version=0))
    join(s, "a", sequences=8), join(s, "b", sequences=2)
    assert [assigned(request(s, f"g0.{i}.t0"))[0][1] for i in range(5)] == ["a", "b", "a", "a", "a"]


def test_cache_affine_keeps_a_trajectory_on_its_worker_and_a_group_together():
    s = two_workers(routing="cache_affine", routing_args={"imbalance": 0.3})
    assert assigned(request(s, "g0.0.t0"))[0][1] == "a"
    assert assigned(request(s, "g0.1.t0"))[0][1] == "a"  # the group's prompt is cached there
    assert assigned(request(s, "g1.0.t0"))[0][1] == "b"
    end(s, "g0.0.t0")
    assert assigned(request(s, "g0.0.t1"))[0][1] == "a"


def test_cache_affine_forgets_with_the_weights():
    s = two_workers(routing="cache_affine", routing_args={"imbalance": 0.3})
    request(s, "g0.0.t0"), end(s, "g0.0.t0"), request(s, "g9.0.t0")
    s.handle(ev.VersionPublished(at=1.0, version=1))
    s.handle(ev.WorkerLoaded(at=2.0, worker="a", version=1)), s.handle(ev.WorkerLoaded(at=2.0, worker="b", version=1))
    assert assigned(request(s, "g0.0.t1"))[0][1] == "b"


def begin(s, groups, step=1):
    return [a.group for a in s.handle(ev.StepBegun(at=0.0, step=step, groups=groups)) if isinstance(a, ev.AdmitGroup)]


def finish(s, group, accepted=True):
    return s.handle(ev.GroupFinished(at=0.0, group=group, accepted=accepted))


def test_a_synchronous_step_trains_on_its_groups_in_the_order_of_the_stream():
    s = make()
    assert begin(s, 3) == ["g0", "g1", "g2"]
    assert finish(s, "g2") == [] and finish(s, "g0") == []
    assert finish(s, "g1") == [ev.StartTraining(1, ["g0", "g1", "g2"])]
    assert begin(s, 2, step=2) == ["g3", "g4"]


def test_a_refused_group_is_replaced_by_the_next_prompt():
    s = make()
    begin(s, 2)
    assert finish(s, "g0", accepted=False) == [ev.AdmitGroup(2, "g2")]
    finish(s, "g1")
    assert finish(s, "g2") == [ev.DropGroup("g0"), ev.StartTraining(1, ["g1", "g2"])]


def test_resampling_is_bounded_then_refused_groups_fill_the_batch():
    s = make(max_admitted=2.0)
    begin(s, 2)
    said = [finish(s, f"g{i}", accepted=False) for i in range(4)]
    assert said[0] == [ev.AdmitGroup(2, "g2")] and said[1] == [ev.AdmitGroup(3, "g3")] and said[2] == []
    assert said[3] == [ev.DropGroup("g2"), ev.DropGroup("g3"), ev.StartTraining(1, ["g0", "g1"])]


def test_oversampling_takes_the_first_and_drops_the_rest():
    s = make(oversample=1.5)
    assert begin(s, 2) == ["g0", "g1", "g2"]
    finish(s, "g2")
    assert finish(s, "g1") == [ev.DropGroup("g0"), ev.StartTraining(1, ["g1", "g2"])]
    assert finish(s, "g0") == []  # too late


def test_the_stream_goes_on_after_a_restore():
    s = make()
    begin(s, 3)
    fresh = make()
    fresh.restore(msgspec.json.decode(msgspec.json.encode(s.snapshot())))
    assert begin(fresh, 1) == ["g3"]


@pytest.mark.parametrize("change, words", [
    (dict(routing=Policy(name="fastest", args={})), "scheduler.routing.name='fastest': unknown policy; one of cache_affine"),
    (dict(batching=Policy(name="synchronous", args={"oversample": 0.5, "max_admitted": 2})), "oversample=0.5"),
    (dict(order=Policy(name="fifo", args={"x": 1})), "scheduler.order.args"),
])
def test_a_bad_policy_is_named(change, words):
    good = dict(provisioning=Policy(name="fixed", args={}), routing=Policy(name="round_robin", args={}),
                order=Policy(name="fifo", args={}),
                batching=Policy(name="synchronous", args={"oversample": 1.0, "max_admitted": 2.0}), queue_depth=0.0)
    with pytest.raises(ConfigError, match=words):
        build(SchedulerConfig(**(good | change)), TIMEOUT_S)
