"""ThunderAgent's programs: which KV counts, which are paused, and where they are restored."""

import pytest

from rose.scheduler import events as ev
from tests.parts.rivals.test_rival_routing import end, join, lend, make, over
from tests.scheduler.said import asked, built, lends, placed

BUFFER = 100  # KV tokens reserved for each active program


def thunder(*workers, kv=1000, **args):
    s = make("thunder", **{"period_s": 5.0, "half_life_s": 1.0} | args)
    for name in workers:
        join(s, name, kv=kv)
    return s


def request(s, turn, context, at=0.0, **kwargs):
    """Request a turn, and return its worker; "" if it waits."""
    return placed(s.handle(asked(turn, at, context, **kwargs))).get(turn, "")


def tick(s, at):
    return placed(s.handle(ev.Tick(at=at)))


def acts(s, trajectory, context, at=0.0):
    """End a turn of the trajectory with this context, so that its tools run; return its worker."""
    worker = request(s, f"{trajectory}.t0", context - 10, at)
    end(s, f"{trajectory}.t0", at)
    return worker


def test_a_context_counts_while_tools_run_and_its_trajectory_returns_to_it_and_frees_it_at_its_end():
    s = thunder("a")
    assert acts(s, "g0.0", 500) == "a"
    assert request(s, "g1.0.t0", 300 + 1) == "", "500 + 301 + 2 * BUFFER > 1,000"
    assert request(s, "g2.0.t0", 300) == "a"
    assert request(s, "g0.0.t1", 550) == "a"
    end(s, "g0.0.t1")
    assert over(s, "g0.0", 1.0) == {"g1.0.t0": "a"}


def test_the_room_of_long_tools_decays_by_half_lives():
    s = thunder("a", half_life_s=10.0)
    acts(s, "g0.0", 800)
    assert request(s, "g1.0.t0", 400 + 1, at=1.0) == ""
    assert request(s, "e0.0.t0", 150, held_out=True) == "a", "evaluations are no programs"
    assert tick(s, 5.0) == {}, "g0.0 still counts 566 tokens"
    assert tick(s, 9.9) == {} == tick(s, 10.0 - 1e-3), "contexts are counted every 5 s"
    assert tick(s, 10.1) == {"g1.0.t0": "a"}, "g0.0 counts 397 tokens"


def test_programs_beyond_a_workers_memory_are_paused_tools_first_and_small_contexts_first():
    s = thunder("a", "b", half_life_s=0.01)
    assert [acts(s, f"g{i}.0", 300) for i in range(4)] == ["a", "b", "a", "b"]
    tick(s, 5.0)  # Programs whose tools run don't count any more.
    assert request(s, "g4.0.t0", 700, at=5.0) == "a"
    assert request(s, "g5.0.t0", 650, at=5.0) == "b"
    # Worker a has 300, 300 and 700 tokens, plus BUFFER each. Both programs whose tools run are
    # paused.
    tick(s, 10.0)
    assert request(s, "g1.0.t1", 310, at=10.0) == "" == request(s, "g2.0.t1", 320, at=10.0)
    # A paused program is restored where there is room, not where it was.
    assert end(s, "g5.0.t0", at=11.0) == {}
    assert over(s, "g5.0", 11.0) == {"g1.0.t1": "b", "g2.0.t1": "b"}


def test_if_generating_programs_exceed_the_memory_the_smallest_is_paused_after_its_turn():
    s = thunder("a", kv=1000)
    request(s, "g0.0.t0", 300), request(s, "g1.0.t0", 400)
    s.handle(ev.TurnProgressed(at=1.0, turn="g1.0.t0", attempt=1, tokens=9))
    s.handle(lends("a", 800, at=2.0))
    tick(s, 5.0)  # 400 and 509 tokens exceed 800.
    end(s, "g0.0.t0", at=6.0), end(s, "g1.0.t0", at=6.0)
    assert request(s, "g0.0.t1", 310, at=7.0) == "", "the smaller one was paused"
    assert request(s, "g1.0.t1", 420, at=7.0) == "a"


def test_a_program_larger_than_any_worker_runs_alone():
    s = thunder("a")
    assert request(s, "g0.0.t0", 5000) == "a"
    assert request(s, "g1.0.t0", 10) == ""
    tick(s, 5.0)
    assert end(s, "g0.0.t0", at=6.0) == {"g1.0.t0": "a"}, "it was paused at its turn's end"
    assert request(s, "g0.0.t1", 5010, at=7.0) == ""


LESS = lends("a", 400, at=1.0, revoked=True)  # more than the program's turn needs
LOST = ev.WorkerLost(at=1.0, worker="a", reason="gone")


@pytest.mark.parametrize("event", [LOST, ev.WorkerDraining(at=1.0, worker="a"), LESS])
def test_programs_of_a_lost_worker_or_one_that_lends_too_little_go_on_elsewhere(event):
    s = thunder("a")
    acts(s, "g0.0", 500)
    s.handle(event)
    assert request(s, "g0.0.t1", 510, at=1.0) == ""
    join(s, "b")
    assert s.cluster.turns["g0.0.t1"].worker == "b"


def test_a_returned_turn_goes_elsewhere_with_its_program():
    s = thunder("a", "b")
    assert request(s, "g0.0.t0", 100) == "a"
    given = placed(s.handle(ev.TurnReturned(at=1.0, turn="g0.0.t0", attempt=1)))
    assert given == {"g0.0.t0": "b"}
    lend(s, "a", 1000)
    end(s, "g0.0.t0")
    assert request(s, "g0.0.t1", 120) == "b"


def test_shortest_first_restores_started_trajectories_first_smallest_first():
    s = built(order="shortest_first")
    s.handle(ev.VersionPublished(at=0.0, version=0))
    join(s, "a", sequences=1)
    assert acts(s, "g0.0", 50) == "a"
    request(s, "g9.0.t0", 5)
    waiting = {"g1.0.t0": 30, "g2.0.t0": 20, "g0.0.t1": 60}
    for turn, context in waiting.items():
        assert request(s, turn, context) == ""
    order = ["g9.0.t0"]
    while len(order) <= len(waiting):
        order += end(s, order[-1])
    assert order[1:] == ["g0.0.t1", "g2.0.t0", "g1.0.t0"]
