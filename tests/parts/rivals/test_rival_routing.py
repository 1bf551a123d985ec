"""Routing by ROSE, Seer, Libra, RollArt and earliest_finish: which worker gets a turn."""

import pytest

from rose.policies.speeds import LeastSquares
from rose.scheduler import events as ev
from tests.scheduler.said import asked, built, joined, lends, placed


def make(routing, *workers, queue_depth=0.0, **args):
    """A scheduler with this routing and dedicated workers of these names."""
    s = built(queue_depth=queue_depth, routing=(routing, args))
    s.handle(ev.VersionPublished(at=0.0, version=0))
    for name in workers:
        join(s, name)
    return s


def join(s, name, kind="dedicated", kv=1000, sequences=8, hardware="H800"):
    s.handle(joined(name, sequences, kv, kind, hardware=hardware))


def lend(s, name, kv, revoked=False, sequences=8):
    s.handle(lends(name, kv, sequences, revoked=revoked))


def request(s, turn, need=100, at=0.0, **kwargs):
    """Request a turn, and return its worker; "" if it waits."""
    actions = s.handle(asked(turn, at, need // 2, need - need // 2, **kwargs))
    return placed(actions).get(turn, "")


def end(s, turn, at=0.0, tokens=10):
    return placed(s.handle(ev.TurnEnded(at=at, turn=turn, tokens=tokens)))


def over(s, trajectory, at=0.0, tokens=10):
    return placed(s.handle(ev.TrajectoryEnded(at=at, trajectory=trajectory, tokens=tokens)))


def lose(s, worker, at=0.0):
    return placed(s.handle(ev.WorkerLost(at=at, worker=worker, reason="gone")))


def progress(s, turn, at, tokens, attempt=1):
    s.handle(ev.TurnProgressed(at=at, turn=turn, attempt=attempt, tokens=tokens))


def test_rose_keeps_a_trajectory_where_its_prefix_is_cached_while_that_has_room():
    s = make("rose", "a", "b")
    assert request(s, "g0.0.t0") == "a"
    assert request(s, "g0.1.t0") == "b"
    assert request(s, "g0.2.t0", need=300) == "a"
    end(s, "g0.0.t0")
    assert request(s, "g0.0.t1") == "a", "though b has the smaller load"


def ends(s, trajectory, at, tokens=100):
    """End a trajectory with its only turn."""
    end(s, f"{trajectory}.t0", at, tokens)
    return over(s, trajectory, at, tokens)


def crowd(s, most=8, worker="a", each=1.0):
    """Run 1 to `most` turns of 100 tokens at once on the only worker, `each` seconds per turn."""
    for n in range(1, most + 1):
        for i in range(n):
            assert request(s, f"x{n}.{i}.t0", at=10.0 * n) == worker
        for i in range(n):
            ends(s, f"x{n}.{i}", (10 + each) * n)


def test_rose_leaves_a_prefix_for_a_worker_where_the_turn_ends_sooner():
    s = make("rose")
    join(s, "a", kv=10_000)
    crowd(s)
    assert [request(s, f"g0.{i}.t0", at=100.0) for i in range(8)] == ["a"] * 8
    join(s, "b", kv=10_000)
    end(s, "g0.0.t0", at=101.0, tokens=100)
    assert request(s, "g0.0.t1", at=101.0) == "b"


def teach_both(s, lent=20.0):
    """Teach the fit that a generates 100 tokens in a second, and the lent c in `lent` seconds."""
    join(s, "a", sequences=1), join(s, "c", "cooperative")
    for n in range(10):
        for i in range(2):
            assert request(s, f"x{n}.{i}.t0") in "ac"
        for i in range(2):
            worker = s.cluster.turns[f"x{n}.{i}.t0"].worker
            ends(s, f"x{n}.{i}", {"a": 1.0, "c": lent}[worker])


def test_rose_lets_a_turn_wait_rather_than_send_it_to_a_lent_worker_where_it_would_end_later():
    s = make("rose")
    teach_both(s)
    join(s, "b", sequences=2), join(s, "d", "cooperative")  # d is not tried while a or b has room.
    assert [request(s, f"g0.{i}.t0", at=30.0) for i in range(4)] == ["a", "b", "b", ""]
    lose(s, "b", at=30.0)
    assert set(lose(s, "a", at=30.0).values()) <= {"c", "d"} and s.waiting == 0, "no other is left"


def test_rose_moves_a_turn_that_is_slow_to_a_fast_worker_that_gets_free_before_one_that_came_later():
    s = make("rose")
    teach_both(s, lent=1.0)
    lend(s, "c", kv=300, sequences=1)
    places = {request(s, f"g0.{i}.t0", at=30.0, need=300): f"g0.{i}.t0" for i in range(3)}
    assert places.keys() == {"a", "c", ""} and places[""] == "g0.2.t0"
    slow = places["c"]
    progress(s, slow, 34.0, 20)
    assert s.handle(ev.Tick(at=34.0)) == [], "no other worker has room"
    answers = s.handle(ev.TurnEnded(at=34.0, turn=places["a"], tokens=400))
    assert answers == [
        ev.AbortTurn(slow, "c", 1, "slow"),
        ev.AssignTurn(slow, "a", 2),
        ev.AssignTurn("g0.2.t0", "c", 1),
    ]
    assert s.cluster.workers["c"].kv_assigned == s.cluster.turns["g0.2.t0"].kv_need


def test_rose_moves_a_trajectory_from_a_lent_worker_only_to_one_below_the_cap():
    s = make("rose")
    teach_both(s, lent=1.0)
    places = {request(s, f"g0.{i}.t0", at=30.0, need=600): f"g0.{i}" for i in range(2)}
    slow, other = places["c"], places["a"]
    progress(s, f"{slow}.t0", 40.0, 10)
    # The tools of `other` run, and its prefix stays on a.
    assert end(s, f"{other}.t0", at=40.0, tokens=100) == {}
    assert s.handle(ev.Tick(at=40.0)) == []
    end(s, f"{slow}.t0", at=300.0, tokens=100)
    assert request(s, f"{slow}.t1", at=300.0, need=600) == "c"
    progress(s, f"{slow}.t1", 310.0, 10)
    over(s, other, 310.0, 100)
    assert placed(s.handle(ev.Tick(at=310.0))) == {f"{slow}.t1": "a"}


def test_rose_moves_no_running_turn_into_the_queue_of_an_engine():
    s = make("rose", queue_depth=1.0)
    teach_both(s, lent=1.0)
    places = {}
    for i in range(4):
        places.setdefault(request(s, f"g0.{i}.t0", at=30.0), []).append(f"g0.{i}.t0")
    slow, (first, second) = places["c"][0], places["a"]
    progress(s, slow, 40.0, 10)
    assert end(s, first, at=40.0, tokens=100) == {}, "the second took its place"
    assert end(s, second, at=40.0, tokens=100) == {slow: "a"}


def test_rose_moves_a_long_turn_though_the_fit_overestimates_contexts_beyond_its_data():
    s = make("rose")
    join(s, "a", kv=10_000), crowd(s)
    lose(s, "a", at=100.0)
    join(s, "c", "cooperative", kv=10_000), crowd(s, worker="c", each=1.5)
    join(s, "a", kv=10_000, sequences=1)
    assert request(s, "g0.0.t0", at=100.0) == "a"
    assert request(s, "g1.0.t0", at=100.0, need=3000) == "c"
    # The fit predicts 40 s because of the long context.
    progress(s, "g1.0.t0", 101.5, 100)
    assert end(s, "g0.0.t0", at=101.5, tokens=100) == {"g1.0.t0": "a"}


def test_rose_leaves_a_turn_where_moving_does_not_pay():
    s = make("rose")
    join(s, "a", sequences=1), join(s, "c", "cooperative")
    for n in range(10):
        for i in range(2):
            request(s, f"x{n}.{i}.t0", at=0.0)
            ends(s, f"x{n}.{i}", 1.0)
    places = {request(s, f"g0.{i}.t0", at=30.0, need=300): i for i in range(2)}
    progress(s, f"g0.{places['c']}.t0", 31.0, 100)
    assert s.handle(ev.TurnEnded(at=31.0, turn=f"g0.{places['a']}.t0", tokens=100)) == []
    assert s.handle(ev.Tick(at=31.5)) == []


def test_rose_tries_an_unmeasured_lent_worker_with_few_turns_and_few_tokens():
    s = make("rose")
    join(s, "a", sequences=6), join(s, "c", "cooperative")
    answers = [s.handle(asked(f"g0.{i}.t0", context=5, new=150)) for i in range(6)]
    sent = [action for actions in answers for action in actions]
    assert [(a.worker, a.max_tokens) for a in sent if a.worker == "c"] == [("c", 128)] * 2
    assert len(sent) == 6


def test_rose_prefers_a_safe_cooperative_worker_and_takes_a_revoked_one_when_no_other_has_room():
    s = make("rose")
    join(s, "a"), join(s, "c", "cooperative"), join(s, "d", "cooperative")
    join(s, "e", "cooperative")
    lend(s, "c", 800), lend(s, "d", 900, revoked=True), lend(s, "e", 99)  # e is lent too little
    assert [request(s, f"g0.{i}.t0") for i in range(5)] == ["c", "a", "a", "c", "a"]
    lose(s, "a"), lose(s, "c")
    assert request(s, "g1.0.t0") == "d"


def test_rose_caps_trajectories_by_their_kv_need_while_tools_run_and_lets_started_ones_continue():
    s = make("rose")
    join(s, "a", kv=250)
    assert [request(s, f"g0.{i}.t0") for i in range(2)] == ["a", "a"]
    end(s, "g0.0.t0"), end(s, "g0.1.t0")  # The tools of both run, and their prefixes stay.
    assert request(s, "g0.2.t0") == ""
    assert request(s, "g0.0.t1") == "a"
    end(s, "g0.0.t1", 0.0, 5)
    assert over(s, "g0.0") == {"g0.2.t0": "a"}
    lose(s, "a")
    end(s, "g0.2.t0"), join(s, "a", kv=250)  # What the lost worker held is forgotten.
    assert [request(s, f"g1.{i}.t0") for i in range(2)] == ["a", "a"]


def test_seer_cuts_a_turn_into_chunks_and_any_worker_takes_the_next():
    s = make("seer", chunk_tokens=40)
    join(s, "a"), join(s, "b")
    s.handle(asked("g0.0.t0", context=50, new=100))
    turn = s.cluster.turns["g0.0.t0"]
    assert (turn.worker, turn.kv_need) == ("a", 90)
    assert request(s, "g1.0.t0", need=20) == "b"
    progress(s, "g0.0.t0", 1.0, 40)
    back = s.handle(ev.TurnReturned(at=1.0, turn="g0.0.t0", attempt=1, chunk=True))
    assert back == [ev.AssignTurn("g0.0.t0", "a", 2, 40)] and turn.kv_need == 130
    progress(s, "g0.0.t0", 2.0, 40, attempt=2)
    request(s, "g2.0.t0", need=400)
    last = s.handle(ev.TurnReturned(at=2.0, turn="g0.0.t0", attempt=2, chunk=True))
    assert last[0].max_tokens == 0 and turn.kv_need == 150


def live(s, trajectory, outcome, tokens):
    """Run a trajectory with a turn of 10 tokens, a tool call, and a turn of `tokens`. Return the
    worker of the second turn."""
    request(s, f"{trajectory}.t0", domain="env")
    end(s, f"{trajectory}.t0", 1.0, 10)
    went = request(s, f"{trajectory}.t1", domain="env", outcome=outcome)
    end(s, f"{trajectory}.t1", 2.0, tokens), over(s, trajectory, 2.0, 10 + tokens)
    return went


def test_libra_moves_a_trajectory_to_the_bucket_that_its_outcomes_predict():
    s = make("libra", *"abc", limits=[50, 200], shares=[1, 1, 1])
    # No trajectory has ended yet, so it stays in the first bucket.
    assert live(s, "g0.0", "failed", 300) == "a"
    assert live(s, "g1.0", "failed", 300) == "c"
    assert live(s, "g2.0", "ok", 20) == "c", "an unknown outcome: the lengths of all count"
    assert live(s, "g3.0", "ok", 60) == "a"
    # The mean of 20 and 60 is in the first bucket, the 90th percentile isn't: it stays.
    assert live(s, "g4.0", "ok", 60) == "a"
    assert live(s, "g5.0", "ok", 400) == "a"
    assert live(s, "g6.0", "failed", 10) == "c"


def test_libra_distributes_workers_to_buckets_by_shares_and_a_full_one_overflows_to_the_next():
    s = make("libra", limits=[50, 200], shares=[0.5, 0.25, 0.25])
    for i in range(8):
        join(s, f"w{i}", sequences=1)
    places = [request(s, f"g0.{i}.t0") for i in range(8)]  # bucket after bucket
    assert set(places[:4]) == {"w0", "w3", "w4", "w7"}
    assert set(places[4:6]) == {"w1", "w5"} and set(places[6:]) == {"w2", "w6"}
    assert request(s, "g1.0.t0") == "" and end(s, "g0.7.t0") == {"g1.0.t0": places[7]}


def test_libra_gives_long_trajectories_the_engines_of_a_large_degree():
    s = make("libra", limits=[50, 200], shares=[1, 1, 1], degrees=[1, 2])
    for name, degree in (("a", 4), ("b", 1), ("c", 2), ("d", 1)):
        shape = ev.Shape(0, degree, 0.01, 0.0, 0.0, 0.0)
        s.handle(joined(name, 1, shape=shape))
    places = [request(s, f"g0.{i}.t0") for i in range(4)]
    assert set(places[:2]) == {"b", "d"} and places[2:] == ["c", "a"]


def test_libra_takes_the_least_loaded_of_a_bucket_however_many_there_are():
    s = make("libra", limits=[50], shares=[1, 1])
    for i in range(100):
        join(s, f"w{i:02}", sequences=2)  # Even numbers join the first bucket.
    for i in range(100):
        # Every worker gets one turn before the first gets two.
        assert request(s, f"g{i}.0.t0") == f"w{2 * i % 100:02}"
    assert request(s, "g100.0.t0") == "w01"


def test_rollart_sends_domains_to_their_hardware_and_elsewhere_only_when_that_is_full():
    s = make("rollart", hardware={"frozen_lake": "H800"}, default="H20")
    join(s, "a", sequences=1), join(s, "h", hardware="H20", sequences=2)
    assert request(s, "g0.0.t0", domain="frozen_lake") == "a"
    assert request(s, "g1.0.t0", domain="maths") == "h"
    assert request(s, "g2.0.t0", domain="frozen_lake") == "h"
    end(s, "g2.0.t0"), end(s, "g0.0.t0")
    # The next turn returns to the domain's hardware, although h has its prefix.
    assert request(s, "g2.0.t1", domain="frozen_lake") == "a"


def teach(s, worker, seconds, turns=40):
    """Run turns of 100 tokens that take `seconds[worker]` on the worker that gets them."""
    for i in range(turns):
        s.handle(asked(f"{worker}{i}.0.t0", context=50, new=100))
        ends(s, f"{worker}{i}.0", seconds[s.cluster.turns[f"{worker}{i}.0.t0"].worker])


def test_earliest_finish_learns_which_worker_is_slow():
    s = make("earliest_finish", chunk_tokens=1000)
    join(s, "a"), join(s, "c", "cooperative")
    teach(s, "x", {"a": 1.0, "c": 4.0})
    assert [request(s, f"g{i}.0.t0", at=5.0) for i in range(2)] == ["a", "a"]


def test_earliest_finish_uses_every_worker_with_room_and_last_the_one_that_stalled():
    s = make("earliest_finish", chunk_tokens=1000)
    join(s, "a", sequences=1), join(s, "c", "cooperative", sequences=1)
    teach(s, "x", {"a": 1.0, "c": 50.0})
    assert [request(s, f"g{i}.0.t0", at=60.0) for i in range(2)] == ["a", "c"]
    end(s, "g1.0.t0", at=60.0)
    stalled = s.handle(ev.Tick(at=1000.0))
    assert placed(stalled) == {"g0.0.t0": "c"}, "c is slow, but a stalled"
    assert placed(s.handle(ev.Tick(at=2000.0))) == {"g0.0.t0": "a"}


def test_least_squares_finds_the_coefficients_and_survives_features_that_never_vary():
    fit = LeastSquares()
    for i in range(5000):
        x = (1 + i % 7, (1 + i % 5) * (1 + i % 7), 0.0)
        fit.update(x, 2 * x[0] + 0.5 * x[1])
    assert fit.predict((10.0, 20.0, 0.0)) == pytest.approx(30.0, rel=1e-3)
    fit.update((1.0, 1.0, 1.0), 2.5 + 3.0)
    assert fit.predict((0.0, 0.0, 1.0)) == pytest.approx(3.0, rel=0.01)


def test_earliest_finish_starts_only_trajectories_whose_prefixes_can_stay_and_lets_started_ones_continue():
    s = make("earliest_finish", chunk_tokens=1000)
    join(s, "a", kv=1000)
    teach(s, "x", {"a": 1.0}, turns=1)  # It ends with 150 tokens of context.
    places = [request(s, f"g{i}.0.t0", need=100, at=2.0) for i in range(8)]
    assert places == ["a"] * 6 + ["", ""]
    end(s, "g0.0.t0", at=3.0)
    assert request(s, "g0.0.t1", need=100, at=3.0) == "a"
    end(s, "g0.0.t1", 4.0, 100)
    assert over(s, "g0.0", 4.0, 110) == {"g6.0.t0": "a"}
