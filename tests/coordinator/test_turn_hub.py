"""Turns survive their workers, and each one is closed once, with each of its tokens once."""

import time

import pytest

from rose import protocol as p
from rose.scheduler import events as ev
from tests import made
from tests.coordinator.conftest import HOST, World, tokens


def test_a_lost_workers_turn_goes_on_elsewhere_which_is_a_migration_and_a_fault(world):
    world.request()
    world.progress([4, 5])
    world.ready("rollout-1")
    world.down("rollout-0")
    world.finish([6], attempt=2, rank=11)
    [(host, result)] = world.taken(p.TurnResult)
    assert host == HOST and tokens(result) == [4, 5, 6] and result.migrations == 1
    assert world.hub.workers.restarts == 1 and world.faults[0][0] == "engine died"


@pytest.mark.parametrize("ends", ["dies", "gives back"])
def test_a_turn_whose_tokens_are_all_here_is_closed_however_its_worker_ends_it(ends, world):
    world.request(new=2)
    world.ready("rollout-1")
    world.progress([4])
    if ends == "dies":
        world.progress([5]), world.down("rollout-0")
    else:
        world.give_back([5])
    [(_, result)] = world.taken(p.TurnResult)
    assert tokens(result) == [4, 5] and result.finish is p.FinishReason.LENGTH
    assert len(world.taken(p.GenerateTurn)) == 1 and world.hub.counts.returned == 0


def test_words_of_an_incarnation_that_is_gone_are_ignored(world):
    world.down("rollout-0")
    world.ready("rollout-0", incarnation=2, version=-1)
    assert world.taken(p.LoadVersion) == [(10, p.LoadVersion(0, "v0/manifest.json"))]
    world.hub.handle(10, p.VersionLoaded("rollout-0", 1, 0, 0.1, 0.1, 10))
    world.hub.handle(10, p.WorkerLoad("rollout-0", 1, 3, 2, 0.5, 0, 0, 0))
    world.hub.handle(10, p.VersionFailed("rollout-0", 1, 0, "tensor 'x' is corrupted"))
    assert world.hub.weights.stale_workers() == ["rollout-0"] and world.actions == []
    assert world.hub.workers["rollout-0"].running == 0
    world.down("rollout-0", incarnation=1)
    assert world.hub.workers["rollout-0"].alive
    world.hub.handle(10, p.VersionLoaded("rollout-0", 2, 0, 0.1, 0.2, 10))
    assert world.hub.weights.stale_workers() == []
    assert (world.hub.weights.sync_bytes, world.hub.weights.sync_pause_s) == (10, 0.2)


def test_turns_that_run_when_their_agent_has_ended_are_aborted(world):
    world.request()
    world.progress([4, 5])
    world.hub.trajectory_ended(made.trajectory("g0.0", stats={"cut_turns": 1.0}))
    assert world.taken(p.AbortTurn) == [(10, p.AbortTurn("g0.0.t0", 1))]
    assert len(world.hub.ledger) == 0 and world.scheduler.cluster.turns == {}


def test_a_turn_that_an_engine_gives_back_counts_as_returned_once_and_as_a_migration(world):
    world.request()
    world.ready("rollout-1")
    world.give_back([6])
    world.give_back([6])
    world.finish([7], attempt=2, rank=11)
    [(_, result)] = world.taken(p.TurnResult)
    assert tokens(result) == [6, 7] and result.migrations == 1
    assert (world.hub.counts.returned, world.hub.ledger.migrations, world.faults) == (1, 1, [])
    world.hub.begin_step()
    assert world.hub.counts.returned == 0


def test_what_a_worker_can_take_is_heard_of_its_present_incarnation_only(world):
    world.request()
    world.give_back([])
    world.capacity("rollout-0", incarnation=2)
    assert len(world.taken(p.GenerateTurn)) == 1  # the first attempt; nobody is left for a second
    world.capacity("rollout-0", kv=0, sequences=0)
    assert world.taken(p.GenerateTurn) == []
    world.capacity("rollout-0", kv=500, sequences=2)
    assert [m.attempt for _, m in world.taken(p.GenerateTurn)] == [2]
    world.down("rollout-0")
    world.capacity("rollout-0")  # a late word of an engine that is gone
    assert world.taken(p.GenerateTurn) == []


def test_a_chunk_that_is_made_goes_on_where_it_was_and_a_stop_ends_the_turn(world):
    world.scheduler._queue._chunk = lambda turn, worker: 2  # tokens of an attempt
    world.request()
    [(_, first)] = world.taken(p.GenerateTurn)
    assert first.sampling.max_new_tokens == 2
    world.finish([4, 5], finish=p.FinishReason.LENGTH)
    [(rank, second)] = world.taken(p.GenerateTurn)
    assert (rank, second.attempt, tokens(second)) == (10, 2, [1, 2, 3, 4, 5])
    assert world.taken(p.TurnResult) == []
    world.finish([6, 7], attempt=2)  # the end-of-turn token is the chunk's last
    [(_, result)] = world.taken(p.TurnResult)
    assert tokens(result) == [4, 5, 6, 7]
    assert (result.migrations, world.hub.ledger.migrations, world.hub.counts.returned) == (0, 0, 0)
    assert world.hub.workers["rollout-0"].open_turns == 0
    world.request("g0.1.t0")  # The model's context ends it within its chunk.
    world.finish([4], turn="g0.1.t0", finish=p.FinishReason.LENGTH)
    [(_, result)] = world.taken(p.TurnResult)
    assert result.finish is p.FinishReason.LENGTH


def test_the_turns_of_a_worker_that_is_to_rest_are_aborted_without_a_fault(world):
    world.ready("rollout-1")
    world.request()
    world.taken(p.GenerateTurn)
    world.scheduler._provisioning.decide = lambda at, cluster: [ev.RestWorker("rollout-0")]
    world.hub.feed(ev.Tick(at=time.time()))
    assert world.taken(p.AbortTurn) == [(10, p.AbortTurn("g0.0.t0", 1))]
    assert [rank for rank, _ in world.taken(p.GenerateTurn)] == [11]
    assert world.faults == world.actions == []
    world.hub.weights.publish(1, "v1/manifest.json")
    assert world.taken(p.LoadVersion) == [(11, p.LoadVersion(1, "v1/manifest.json"))]
    assert world.hub.weights.stale_workers() == ["rollout-1"]


def test_a_worker_that_could_not_load_a_version_is_given_the_newer_one_that_is_there(world):
    world.hub.weights.publish(1, "store")
    world.hub.weights.publish(2, "store")
    assert world.taken(p.LoadVersion) == [(10, p.LoadVersion(1, "store"))]
    world.hub.handle(10, p.VersionFailed("rollout-0", 1, 1, "version 1 can't be reached"))
    assert world.actions == []
    assert world.taken(p.LoadVersion) == [(10, p.LoadVersion(2, "store"))]
    world.hub.handle(10, p.VersionFailed("rollout-0", 1, 2, "tensor 'x' is corrupted"))
    [action] = world.actions
    assert isinstance(action, ev.GiveUp) and "rollout-0" in action.reason
    assert "tensor 'x'" in action.reason


def test_nobody_waits_for_a_hybrid_engine_that_could_not_load_the_newest_version(tmp_path):
    world = World(tmp_path, hybrids=(10,))
    world.ready("rollout-0")
    world.hub.weights.publish(1, "store")
    assert world.taken(p.LoadVersion) == [(10, p.LoadVersion(1, "store"))]
    world.hub.handle(10, p.VersionFailed("rollout-0", 1, 1, "the route took too long"))
    assert world.actions == [] and [what for what, _ in world.faults] == ["version not loaded"]
    assert world.taken(p.LoadVersion) == [(10, p.LoadVersion(1, "store"))]
    for _ in range(2):
        world.hub.handle(10, p.VersionFailed("rollout-0", 1, 1, "tensor 'x' is corrupted"))
    assert world.taken(p.LoadVersion) == [(10, p.LoadVersion(1, "store"))]  # a third time, the last
    assert world.faults[-1][1].endswith("not before the next version") and world.actions == []
    world.hub.weights.publish(2, "store")
    assert world.taken(p.LoadVersion) == [(10, p.LoadVersion(2, "store"))]
    world.hub.handle(10, p.VersionFailed("rollout-0", 1, 2, "the route took too long"))
    assert world.taken(p.LoadVersion) == [(10, p.LoadVersion(2, "store"))]


def test_the_last_worker_that_is_not_restarted_ends_the_run_once_an_own_one_was_ready(world):
    # After a requeue, a borrowed engine may be ready before the run's own engines.
    world.hub.workers.own_ready = False
    world.down("rollout-0", restarting=False)
    assert world.actions == []
    world.ready("rollout-0")
    world.down("rollout-0", restarting=False)
    [action] = world.actions
    assert isinstance(action, ev.GiveUp) and "no rollout worker is left" in action.reason


def test_a_turn_that_is_cancelled_before_its_assignment_is_carried_out_is_not_sent(world):
    """One event drops a group and finds a worker for one of its turns: the drop comes first, and
    what it causes is heard after the assignment, which is passed over."""
    world.request("g0.0.t0")
    world.request("g1.0.t0")
    handle, engine = world.scheduler.handle, world.hub.workers["rollout-0"]
    both = [ev.DropGroup("g0"), ev.AssignTurn("g0.0.t0", "rollout-0", 2)]
    world.scheduler.handle = lambda e: [*(both if isinstance(e, ev.Tick) else ()), *handle(e)]
    world.hub._on_action = lambda action: world.hub.cancel("g0.0")
    world.taken(p.GenerateTurn)
    assert engine.open_turns == 2
    world.hub.feed(ev.Tick(at=time.time()))
    assert [m.turn for _, m in world.taken(p.AbortTurn)] == ["g0.0.t0"]
    assert world.taken(p.GenerateTurn) == [] and engine.open_turns == 1
    assert list(world.scheduler.cluster.turns) == ["g1.0.t0"]


def test_what_a_worker_that_is_not_known_could_not_load_ends_nothing(world):
    world.hub.weights.publish(1, "store")
    world.hub.handle(101, p.VersionFailed("borrowed-1", 1, 0, "the store can't be reached"))
    assert world.actions == world.faults == []


def test_a_worker_that_starts_again_without_a_report_of_its_end_gives_its_turns_to_others(world):
    world.request("g0.0.t0")
    world.taken(p.GenerateTurn)
    world.ready("rollout-1")
    world.ready("rollout-0", incarnation=2)
    assert [message.turn for _, message in world.taken(p.GenerateTurn)] == ["g0.0.t0"]
    assert [w.open_turns for w in world.hub.workers.values()].count(1) == 1
