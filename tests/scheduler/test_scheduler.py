"""The scheduler as a pure state machine: events in, actions out."""

import pytest

from rose.config import ConfigError
from rose.policies.plain import Fifo, Fixed, LeastLoaded
from rose.policies.verl import Synchronous
from rose.scheduler import Scheduler
from rose.scheduler import events as ev
from tests.scheduler.said import asked, built, joined, lends

TIMEOUT_S = 60.0


def make(routing="least_loaded", routing_args=None, queue_depth=0.0, **batching):
    batching_args = {"max_admitted": 4.0} | batching
    return built(TIMEOUT_S, queue_depth, batching_args, routing=(routing, routing_args or {}))


def join(s, name, sequences=4, kv=10_000, version=0, at=0.0):
    return s.handle(joined(name, sequences, kv, at=at, version=version))


def request(s, turn, at=0.0, context=10, new=10):
    return s.handle(asked(turn, at, context, new))


def end(s, turn, at=0.0):
    return s.handle(ev.TurnEnded(at=at, turn=turn))


def of_workers(*names, policies=None, **sizes):
    """A scheduler with these workers, which have the newest weights."""
    s = make(**policies or {})
    s.handle(ev.VersionPublished(at=0.0, version=0))
    for name in names:
        join(s, name, **sizes)
    return s


def of_policies(*policies):
    """A scheduler of provisioning, routing and order policies, which has published weights."""
    s = Scheduler(*policies, Synchronous(4.0), 0.0, TIMEOUT_S)
    s.handle(ev.VersionPublished(at=0.0, version=0))
    return s


def assigned(actions):
    return [(a.turn, a.worker, a.attempt) for a in actions if isinstance(a, ev.AssignTurn)]


def test_a_worker_with_old_weights_loads_before_it_gets_a_turn():
    s = make()
    s.handle(ev.VersionPublished(at=0.0, version=3))
    assert join(s, "a", version=-1) == [ev.LoadWeights("a", 3)]
    assert request(s, "g0.0.t0") == []
    expected = [("g0.0.t0", "a", 1)]
    assert assigned(s.handle(ev.WorkerLoaded(at=1.0, worker="a", version=3))) == expected


def test_a_version_published_while_loading_is_loaded_next():
    s = make()
    s.handle(ev.VersionPublished(at=0.0, version=1))
    join(s, "a", version=0)
    assert s.handle(ev.VersionPublished(at=1.0, version=2)) == []
    assert s.handle(ev.WorkerLoaded(at=2.0, worker="a", version=1)) == [ev.LoadWeights("a", 2)]


def test_queue_depth_sends_a_few_turns_ahead():
    s = of_workers("a", sequences=2, policies={"queue_depth": 0.5})
    sent = [assigned(request(s, f"g0.{i}.t0")) for i in range(4)]
    assert [len(x) for x in sent] == [1, 1, 1, 0]


def test_progress_of_an_earlier_attempt_does_not_count():
    s = of_workers("a", "b")
    request(s, "g0.0.t0")
    s.handle(ev.WorkerLost(at=1.0, worker="a", reason="killed"))
    s.handle(ev.TurnProgressed(at=2.0, turn="g0.0.t0", attempt=1, tokens=5))
    assert s.cluster.turns["g0.0.t0"].made_tokens == 0
    s.handle(ev.TurnProgressed(at=2.0, turn="g0.0.t0", attempt=2, tokens=5))
    assert s.cluster.turns["g0.0.t0"].made_tokens == 5


def test_a_turn_without_a_token_until_the_deadline_moves_to_another_worker():
    s = of_workers("a", "b")
    request(s, "g0.0.t0", at=0.0)
    assert s.handle(ev.Tick(at=TIMEOUT_S)) == []
    expected = [ev.AbortTurn("g0.0.t0", "a", 1, "stalled"), ev.AssignTurn("g0.0.t0", "b", 2)]
    assert s.handle(ev.Tick(at=TIMEOUT_S + 1)) == expected
    s.handle(ev.TurnProgressed(at=TIMEOUT_S * 2, turn="g0.0.t0", attempt=2, tokens=1))
    assert s.handle(ev.Tick(at=TIMEOUT_S * 2.5)) == [], "progress counts"


def test_a_turn_that_stalls_everywhere_ends_the_run():
    s = of_workers("a", "b")
    request(s, "g0.0.t0")
    answers = [s.handle(ev.Tick(at=(TIMEOUT_S + 1) * k)) for k in range(1, 8)]
    last = [a for actions in answers for a in actions if isinstance(a, ev.GiveUp)][0]
    assert "g0.0.t0 stalled 5 times" in last.reason and "rollout.turn_timeout_s" in last.reason


def return_turn(s, turn, attempt, at=0.0):
    return s.handle(ev.TurnReturned(at=at, turn=turn, attempt=attempt))


def capacity(s, worker, kv=10_000, sequences=4, revoked=False, expected=0.0, at=0.0):
    return s.handle(lends(worker, kv, sequences, at, expected, revoked))


def test_returned_turns_never_count_as_stalls():
    s = of_workers("a")
    request(s, "g0.0.t0")
    for attempt in range(1, 20):
        return_turn(s, "g0.0.t0", attempt)
        assert assigned(capacity(s, "a")) == [("g0.0.t0", "a", attempt + 1)]
    answers = s.handle(ev.Tick(at=TIMEOUT_S + 1))
    expected = [ev.AbortTurn("g0.0.t0", "a", 20, "stalled"), ev.AssignTurn("g0.0.t0", "a", 21)]
    assert answers == expected


def by_cache(imbalance):
    return {"routing": "cache_affine", "routing_args": {"imbalance": imbalance}}


def test_a_worker_that_returns_a_turn_is_no_longer_home_of_its_trajectory():
    s = of_workers("a", "b", policies=by_cache(1.0))
    request(s, "g0.0.t0"), return_turn(s, "g0.0.t0", 1), end(s, "g0.0.t0")
    assert s.cluster.home == {"g0.0": "b"}


def test_a_large_turn_that_waits_for_a_whole_worker_is_not_starved_by_small_ones_behind_it():
    s = of_workers("a", "b", kv=100)
    capacity(s, "b", kv=50)
    # a is full, b can't hold the second turn.
    request(s, "g0.0.t0", context=80), request(s, "g0.1.t0", context=80)
    assert assigned(request(s, "g0.2.t0")) == [("g0.2.t0", "b", 1)]
    assert request(s, "g0.3.t0", context=30) == [], "b has no room now"
    assert assigned(end(s, "g0.0.t0")) == [("g0.1.t0", "a", 1)]


class Resting:
    """Cooperative workers join resting under it, and a tick returns the actions of `next`."""

    def __init__(self):
        self.next, self.received = [], []

    def joins_resting(self, kind):
        return kind == "cooperative"

    def decide(self, at, cluster):
        answers, self.next = self.next, []
        return answers

    def on_event(self, event, cluster):
        self.received.append(type(event).__name__)


def resting():
    policy = Resting()
    s = of_policies(policy, LeastLoaded(), Fifo())
    s.handle(joined("a", 4, kind="cooperative", version=-1))
    return s, policy


def say(s, policy, *actions):
    policy.next = list(actions)
    return s.handle(ev.Tick(at=0.0))


def test_a_worker_that_rests_gets_neither_weights_nor_turns_until_it_is_used():
    s, policy = resting()
    assert request(s, "g0.0.t0") == []
    expected = [ev.UseWorker("a"), ev.LoadWeights("a", 0), ev.UseWorker("nobody")]
    assert say(s, policy, ev.UseWorker("a"), ev.UseWorker("nobody")) == expected
    expected = [("g0.0.t0", "a", 1)]
    assert assigned(s.handle(ev.WorkerLoaded(at=1.0, worker="a", version=0))) == expected


def test_the_turns_of_a_worker_that_is_to_rest_go_elsewhere_without_a_stall():
    s, policy = resting()
    say(s, policy, ev.UseWorker("a")), s.handle(ev.WorkerLoaded(at=1.0, worker="a", version=0))
    request(s, "g0.0.t0")
    expected = [ev.RestWorker("a"), ev.AbortTurn("g0.0.t0", "a", 1, "rest")]
    assert say(s, policy, ev.RestWorker("a")) == expected
    assert (s.waiting, s.cluster.home, s.cluster.turns["g0.0.t0"].stalls) == (1, {}, 0)
    assert assigned(join(s, "b")) == [("g0.0.t0", "b", 2)]
    assert say(s, policy, ev.UseWorker("a")) == [ev.UseWorker("a")] and len(s.fleet) == 2


def test_policies_receive_only_events_that_are_current():
    s, policy = resting()
    end(s, "g0.9.t0"), return_turn(s, "g0.9.t0", 1)
    s.handle(ev.WorkerLost(at=0.0, worker="x", reason="late"))
    assert policy.received == ["VersionPublished", "WorkerJoined"]
    request(s, "g0.0.t0"), end(s, "g0.0.t0"), end(s, "g0.0.t0")
    assert policy.received[2:] == ["TurnEnded"]


class Chunks(LeastLoaded):
    def chunk(self, turn, worker):
        return 4

    def kv_need(self, turn):
        return turn.context_tokens + min(turn.max_new_tokens, turn.made_tokens + 4)


def test_a_turn_in_chunks_needs_room_for_one_chunk_and_returns_to_its_worker():
    s = of_policies(Fixed(), Chunks(), Fifo())
    join(s, "a", kv=20)
    assert request(s, "g0.0.t0", new=6) == [ev.AssignTurn("g0.0.t0", "a", 1, 4)]
    assert s.cluster.workers["a"].kv_assigned == 14
    s.handle(ev.TurnProgressed(at=0.0, turn="g0.0.t0", attempt=1, tokens=4))
    expected = [ev.AssignTurn("g0.0.t0", "a", 2)]
    assert s.handle(ev.TurnReturned(at=0.0, turn="g0.0.t0", attempt=1, chunk=True)) == expected
    assert s.cluster.home == {"g0.0": "a"} and s.cluster.workers["a"].kv_assigned == 16


class ByHardware:
    """Routing to the hardware that has the name of the turn's domain."""

    def choose(self, turn, fleet, cluster):
        return fleet.least(turn, hardware=turn.domain)


class ByHardwareInLanes(ByHardware):
    def lane(self, turn):
        return turn.domain


@pytest.mark.parametrize("routing", [ByHardware(), ByHardwareInLanes()])
def test_turns_that_wait_for_one_hardware_do_not_block_turns_for_another(routing):
    s = of_policies(Fixed(), routing, Fifo())
    for hardware in ("H20", "H800"):
        s.handle(joined(hardware, 1, hardware=hardware))
    for i, domain in enumerate(["H800", "H800", "H800", "H20"]):
        answers = s.handle(asked(f"g0.{i}.t0", context=1, new=1, domain=domain))
    assert assigned(answers) == [("g0.3.t0", "H20", 1)] and s.waiting == 2
    assert assigned(end(s, "g0.0.t0")) == [("g0.1.t0", "H800", 1)]


class Youngest:
    """Last come, first served, until the next step begins; then by arrival."""

    def __init__(self):
        self.sign, self.queued = -1, []

    def key(self, turn, cluster):
        self.queued.append(turn.turn)
        return self.sign * turn.sequence

    def changed(self, event, cluster):
        if isinstance(event, ev.StepBegun):
            self.sign = 1
            return list(self.queued)
        return ()


def test_turns_whose_key_an_event_changes_get_new_places():
    s = of_policies(Fixed(), LeastLoaded(), Youngest())
    join(s, "a", sequences=1)
    for i in range(4):
        request(s, f"g0.{i}.t0")
    assert assigned(end(s, "g0.0.t0")) == [("g0.3.t0", "a", 1)]
    s.handle(ev.StepBegun(at=0.0, step=1, groups=1))
    assert assigned(end(s, "g0.3.t0")) == [("g0.1.t0", "a", 1)]


def test_the_same_turn_twice_is_an_error():
    s = of_workers("a")
    request(s, "g0.0.t0")
    with pytest.raises(ValueError, match="g0.0.t0 was requested twice"):
        request(s, "g0.0.t0")


def test_least_loaded_weighs_by_capacity():
    s = of_workers("a", sequences=8)
    join(s, "b", sequences=2)
    assert [assigned(request(s, f"g0.{i}.t0"))[0][1] for i in range(5)] == ["a", "b", "a", "a", "a"]


def test_cache_affine_keeps_a_trajectory_on_its_worker_and_a_group_together():
    s = of_workers("a", "b", policies=by_cache(0.3))
    assert assigned(request(s, "g0.0.t0"))[0][1] == "a"
    assert assigned(request(s, "g0.1.t0"))[0][1] == "a", "the group's prompt is cached there"
    assert assigned(request(s, "g1.0.t0"))[0][1] == "b"
    end(s, "g0.0.t0")
    assert assigned(request(s, "g0.0.t1"))[0][1] == "a"


def test_cache_affine_forgets_with_the_weights():
    s = of_workers("a", "b", policies=by_cache(0.3))
    request(s, "g0.0.t0"), end(s, "g0.0.t0"), request(s, "g9.0.t0")
    s.handle(ev.VersionPublished(at=1.0, version=1))
    for worker in ("a", "b"):
        s.handle(ev.WorkerLoaded(at=2.0, worker=worker, version=1))
    assert assigned(request(s, "g0.0.t1"))[0][1] == "b"


@pytest.mark.parametrize(
    "change, words",
    [
        ({"routing": "fastest"}, "scheduler.routing.name='fastest': no"),
        ({"batching": ("synchronous", {"max_admitted": 0.5})}, "max_admitted=0.5"),
        ({"order": ("fifo", {"x": 1})}, "scheduler.order.args"),
    ],
)
def test_a_bad_policy_is_named(change, words):
    with pytest.raises(ConfigError, match=words):
        built(**change)
