"""The scheduler as a pure state machine: events in, actions out."""

import pytest

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


def test_queue_depth_sends_a_few_turns_ahead():
    s = of_workers("a", sequences=2, policies={"queue_depth": 0.5})
    assert [len(assigned(request(s, f"g0.{i}.t0"))) for i in range(4)] == [1, 1, 1, 0]


def test_progress_of_an_earlier_attempt_does_not_count_nor_may_a_turn_come_twice():
    s = of_workers("a", "b")
    request(s, "g0.0.t0")
    with pytest.raises(ValueError, match="g0.0.t0 was requested twice"):
        request(s, "g0.0.t0")
    s.handle(ev.WorkerLost(at=1.0, worker="a", reason="killed"))
    for attempt, tokens in ((1, 0), (2, 5)):
        s.handle(ev.TurnProgressed(at=2.0, turn="g0.0.t0", attempt=attempt, tokens=5))
        assert s.cluster.turns["g0.0.t0"].made_tokens == tokens


def test_a_turn_without_a_token_until_the_deadline_moves_and_one_that_stalls_everywhere_ends_the_run():
    s = of_workers("a", "b")
    request(s, "g0.0.t0", at=0.0)
    assert s.handle(ev.Tick(at=TIMEOUT_S)) == []
    expected = [ev.AbortTurn("g0.0.t0", "a", 1, "stalled"), ev.AssignTurn("g0.0.t0", "b", 2)]
    assert s.handle(ev.Tick(at=TIMEOUT_S + 1)) == expected
    s.handle(ev.TurnProgressed(at=TIMEOUT_S * 2, turn="g0.0.t0", attempt=2, tokens=1))
    assert s.handle(ev.Tick(at=TIMEOUT_S * 2.5)) == [], "progress counts"
    answers = [s.handle(ev.Tick(at=(TIMEOUT_S + 1) * k)) for k in range(4, 10)]
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


BY_CACHE = {"routing": "cache_affine", "routing_args": {"imbalance": 0.3}}


def test_a_worker_that_returns_a_turn_is_no_longer_home_of_its_trajectory():
    s = of_workers("a", "b", policies=BY_CACHE)
    request(s, "g0.0.t0"), return_turn(s, "g0.0.t0", 1), end(s, "g0.0.t0")
    assert s.cluster.home == {"g0.0": "b"}


class Recorder(Fixed):
    def __init__(self):
        self.next, self.received = [], []

    def decide(self, at, cluster):
        answers, self.next = self.next, []
        return answers

    def on_event(self, event, cluster):
        self.received.append(type(event).__name__)


def test_the_turns_of_a_worker_that_is_to_rest_go_elsewhere_without_a_stall():
    policy = Recorder()
    s = of_policies(policy, LeastLoaded(), Fifo())
    join(s, "a"), request(s, "g0.0.t0")
    policy.next = [ev.RestWorker("a"), ev.UseWorker("nobody")]
    actions = s.handle(ev.Tick(at=0.0))
    assert ev.AbortTurn("g0.0.t0", "a", 1, "rest") in actions
    assert (s.waiting, s.cluster.home, s.cluster.turns["g0.0.t0"].stalls) == (1, {}, 0)


def test_policies_receive_only_events_that_are_current():
    policy = Recorder()
    s = of_policies(policy, LeastLoaded(), Fifo())
    join(s, "a"), end(s, "g0.9.t0"), return_turn(s, "g0.9.t0", 1)
    s.handle(ev.WorkerLost(at=0.0, worker="x", reason="late"))
    request(s, "g0.0.t0"), end(s, "g0.0.t0"), end(s, "g0.0.t0")
    assert policy.received == ["VersionPublished", "WorkerJoined", "TurnEnded"]


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


def test_least_loaded_weighs_by_capacity():
    s = of_workers("a", sequences=8)
    join(s, "b", sequences=2)
    assert [assigned(request(s, f"g0.{i}.t0"))[0][1] for i in range(5)] == ["a", "b", "a", "a", "a"]


def test_cache_affine_forgets_with_the_weights():
    s = of_workers("a", "b", policies=BY_CACHE)
    request(s, "g0.0.t0"), end(s, "g0.0.t0"), request(s, "g9.0.t0")
    s.handle(ev.VersionPublished(at=1.0, version=1))
    for worker in ("a", "b"):
        s.handle(ev.WorkerLoaded(at=2.0, worker=worker, version=1))
    assert assigned(request(s, "g0.0.t1"))[0][1] == "b"
