"""Evaluation turns: they follow all training turns, prefer borrowed workers, and are preempted."""

import pytest

from rose.parts.rivals import thunder
from rose.policies.registry import policies
from rose.scheduler import events as ev
from tests.scheduler.said import asked, joined, lends, placed
from tests.scheduler.test_scheduler import end, make

ARGS = {
    "thunder": {"period_s": 5.0, "half_life_s": 1.0},
    "cache_affine": {"imbalance": 1.0},
    "earliest_finish": {"chunk_tokens": 8192},
    "libra": {"limits": [5000], "shares": [0.5, 0.5]},
    "rollart": {"hardware": {}, "default": ""},
    "seer": {"chunk_tokens": 8192},
}


def scheduler(*workers, sequences=2, kv=10_000, **kwargs):
    """Return a scheduler with these workers: d... are dedicated, s... spot."""
    s = make(**kwargs)
    s.handle(ev.VersionPublished(at=0.0, version=0))
    for name in workers:
        s.handle(joined(name, sequences, kv, {"d": "dedicated", "s": "spot"}[name[0]]))
    return s


def ask(s, turn, new=10):
    return s.handle(asked(turn, new=new, held_out=turn.startswith("e")))


def test_evaluation_turns_prefer_a_borrowed_worker_with_room_to_a_dedicated_one():
    s = scheduler("d0", "s0", "s1", sequences=1)
    expected = [{"e0-0.0.t0": "s0"}, {"e0-1.0.t0": "s1"}, {"e0-2.0.t0": "d0"}, {}]
    assert [placed(ask(s, f"e0-{i}.0.t0")) for i in range(4)] == expected
    assert placed(end(s, "e0-1.0.t0")) == {"e0-3.0.t0": "s1"}


def test_the_next_turn_of_a_trajectory_goes_where_its_prefix_is_cached():
    s = scheduler("s0", "s1")
    assert placed(ask(s, "e0-0.0.t0")) == {"e0-0.0.t0": "s0"}
    ask(s, "e0-1.0.t0"), ask(s, "e0-2.0.t0"), end(s, "e0-0.0.t0")
    assert s.cluster.workers["s1"].load <= s.cluster.workers["s0"].load
    end(s, "e0-1.0.t0")
    assert placed(ask(s, "e0-0.0.t1")) == {"e0-0.0.t1": "s0"}, "s1 is empty"


def test_waiting_training_turns_precede_evaluation_turns_that_arrived_earlier():
    s = scheduler("d0", sequences=1)
    ask(s, "g0.0.t0"), ask(s, "e0-0.0.t0"), ask(s, "g1.0.t0")
    assert placed(end(s, "g0.0.t0")) == {"g1.0.t0": "d0"}
    assert placed(end(s, "g1.0.t0")) == {"e0-0.0.t0": "d0"}


def test_a_training_turn_without_room_preempts_the_newest_evaluation_turn():
    s = scheduler("d0")
    ask(s, "e0-0.0.t0"), ask(s, "e0-1.0.t0")
    expected = [ev.AbortTurn("e0-1.0.t0", "d0", 1, "training"), ev.AssignTurn("g0.0.t0", "d0", 1)]
    assert ask(s, "g0.0.t0") == expected
    assert placed(ask(s, "g1.0.t0")) == {"g1.0.t0": "d0"}
    assert ask(s, "g2.0.t0") == [] and s.waiting == 3, "training turns aren't preempted"
    assert placed(end(s, "g0.0.t0")) == {"g2.0.t0": "d0"}
    assert placed(end(s, "g1.0.t0")) == {"e0-0.0.t0": "d0"}


def test_as_few_turns_are_preempted_as_make_room_and_none_if_that_does_not_help():
    s = scheduler("d0", sequences=8, kv=100)
    for i in range(4):
        ask(s, f"e0-{i}.0.t0")  # 20 tokens each
    actions = [type(action) for action in ask(s, "g0.0.t0", new=40)]
    assert actions == [ev.AbortTurn, ev.AbortTurn, ev.AssignTurn], "of 50 tokens, 20 are free"
    assert ask(s, "g1.0.t0", new=85) == [], "a turn of 95 tokens waits until g0 has ended"
    assert {"e0-0.0.t0", "e0-1.0.t0"} <= s.cluster.workers["d0"].turns.keys()


def test_evaluation_turns_of_a_draining_worker_are_not_preempted():
    s = scheduler("d0", "d1", sequences=1)
    ask(s, "e0-0.0.t0"), ask(s, "e0-1.0.t0")
    s.handle(ev.WorkerDraining(at=0.0, worker="d0"))
    expected = [ev.AbortTurn("e0-1.0.t0", "d1", 1, "training"), ev.AssignTurn("g0.0.t0", "d1", 1)]
    assert ask(s, "g0.0.t0") == expected


@pytest.mark.parametrize("routing", policies("routing"))
def test_for_every_routing_evaluation_trajectories_let_training_ones_start(routing, monkeypatch):
    monkeypatch.setattr(thunder, "BUFFER", 0)  # It suits engines a thousand times as large.
    s = scheduler("d0", sequences=8, kv=100, routing=routing, routing_args=ARGS.get(routing))
    s.handle(ev.StepBegun(at=0.0, step=1, groups=4))
    ask(s, "g9.0.t0")
    s.handle(ev.TurnEnded(at=0.0, turn="g9.0.t0", tokens=10))
    s.handle(ev.TrajectoryEnded(at=0.0, trajectory="g9.0", tokens=10))
    for i in range(5):
        ask(s, f"e0-{i}.0.t0")  # 20 tokens each, so the engine is full
    for i in range(2, 5):
        end(s, f"e0-{i}.0.t0")  # Now the trajectory's tools run.
    assert placed(ask(s, "g0.0.t0")) == {"g0.0.t0": "d0"}
    for i in range(1, 4):
        assert placed(ask(s, f"g{i}.0.t0"))[f"g{i}.0.t0"] == "d0"
    for i in range(4):
        end(s, f"g{i}.0.t0")
    assert s.waiting == 0, "evaluations continue when training leaves them room"


def test_a_large_turn_that_preemption_cannot_help_does_not_delay_smaller_ones():
    s = scheduler("d0", "s0", sequences=8, kv=100)
    s.handle(lends("s0", kv=50))
    ask(s, "e0-0.0.t0", new=40), ask(s, "g0.0.t0", new=60)
    assert ask(s, "g1.0.t0", new=80) == [], "of 90 tokens: it waits for g0"
    assert ask(s, "g2.0.t0", new=30) == [
        ev.AbortTurn("e0-0.0.t0", "s0", 1, "training"),
        ev.AssignTurn("g2.0.t0", "s0", 1),
    ], "s0 is too small for g1 even when empty"
    assert ask(s, "g3.0.t0", new=30) == []


def test_a_turn_for_which_preemption_failed_does_not_delay_smaller_ones():
    s = scheduler("d0", sequences=2)
    choose = s._queue._choose
    s._queue._choose = lambda turn, *state: None if turn.group == "g0" else choose(turn, *state)
    ask(s, "e0-0.0.t0"), ask(s, "e0-1.0.t0")
    assert ask(s, "g0.0.t0")[0] == ev.AbortTurn("e0-1.0.t0", "d0", 1, "training")
    assert placed(ask(s, "g1.0.t0", new=5)) == {"g1.0.t0": "d0"}
    assert s.handle(ev.Tick(at=1.0)) == []
