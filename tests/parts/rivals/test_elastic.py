"""elastic: which of the engines that share GPUs are awake, and when."""

import pytest

from rose.scheduler import events as ev
from tests.parts.rivals import test_rival_provisioning as rivals
from tests.scheduler.said import asked, joined
from tests.scheduler.test_refusals import ELASTIC

ARGS = ELASTIC | {"n_serving": 0, "switch_s": 1.0}
# (degree, step_s, sequence_s): with one sequence a wide engine is faster than a narrow one, with
# eight it is slower.
NARROW, WIDE = (1, 0.006, 0.0), (4, 0.002, 0.002)


def make(**changed):
    """Return a scheduler that has seen eight trajectories of 1,000 tokens end."""
    s = rivals.make("elastic", **ARGS | changed)
    for i in range(4):
        join(s, f"n{i}", i, *NARROW)
    join(s, "w", 0, *WIDE)
    s.handle(ev.StepBegun(at=0.0, step=0, groups=1))
    for i in range(8):
        s.handle(ev.TrajectoryEnded(at=0.0, trajectory=f"old.{i}", tokens=1000))
    return s


def join(s, name, first, degree, step_s, sequence_s):
    shape = ev.Shape(first, degree, step_s, sequence_s, 0.0, 1e-5)
    s.handle(joined(name, 2 * degree, 100_000, hardware=f"H800x{degree}", shape=shape))


def ask(s, count, begin=0):
    for i in range(begin, begin + count):
        s.handle(asked(f"g.{i}.t0", 1.0, 100))


def awake(s):
    return "".join(sorted(n for n, w in s.cluster.workers.items() if not w.resting))


def test_the_tail_moves_to_the_wide_engine_and_a_full_step_back_to_the_narrow_ones():
    s = make()
    assert awake(s) == "n0n1n2n3", "those that joined first"
    for count in (0, 8):
        ask(s, count)
        s.handle(ev.Tick(at=2.0))
        assert awake(s) == "n0n1n2n3"
    for i in range(7):
        s.handle(ev.TurnEnded(at=3.0, turn=f"g.{i}.t0", tokens=10))
    actions = s.handle(ev.Tick(at=4.0))
    assert awake(s) == "w"
    # The turn is aborted on the engine that goes to sleep, and sent to the wide one.
    abort, assign = (a for a in actions if isinstance(a, ev.AbortTurn | ev.AssignTurn))
    assert isinstance(abort, ev.AbortTurn) and (assign.turn, assign.worker) == ("g.7.t0", "w")
    ask(s, 16, begin=8)
    s.handle(ev.Tick(at=5.0))
    assert awake(s) == "n0n1n2n3"


@pytest.mark.parametrize("changed", [{"switch_s": 60.0}, {"gain": 0.9}])
def test_no_degree_changes_for_less_than_it_costs(changed):
    s = make(**changed)
    ask(s, 1)
    s.handle(ev.Tick(at=2.0))
    assert awake(s) == "n0n1n2n3"


def test_for_a_trajectory_longer_than_all_others_no_remaining_tokens_are_predicted():
    s = make()
    ask(s, 1)
    s.handle(ev.TurnEnded(at=2.0, turn="g.0.t0", tokens=2000))
    s.handle(asked("g.0.t1", 3.0, 2100))
    s.handle(ev.Tick(at=4.0))
    assert awake(s) == "n0n1n2n3"


def test_a_lost_wide_engine_leaves_its_gpus_to_the_narrow_ones_which_wake():
    s = make()
    ask(s, 1)
    s.handle(ev.Tick(at=2.0))
    assert awake(s) == "w"
    s.handle(ev.WorkerLost(at=3.0, worker="w", reason="gone"))
    s.handle(ev.Tick(at=4.0))
    assert awake(s) == "n0n1n2n3"
    join(s, "w", 0, *WIDE)
    assert awake(s) == "n0n1n2n3", "the narrow engines keep the GPUs"


def test_an_engine_that_shares_no_gpu_never_sleeps():
    s = make()
    join(s, "own", 4, *NARROW)
    join(s, "x", 5, *WIDE)  # across the boundary where a second wide engine would begin
    ask(s, 1)
    for at in (2.0, 3.0):
        s.handle(ev.Tick(at=at))
        assert {"own", "x"} <= {n for n, w in s.cluster.workers.items() if not w.resting}


def test_engines_that_overlap_in_part_are_never_awake_at_once():
    s = make()
    for name, first in (("a", 10), ("b", 12), ("c", 14)):
        join(s, name, first, 2, 0.006, 0.0)
    for name, first in (("y", 10), ("z", 13)):
        join(s, name, first, 3, 0.002, 0.002)
    for step in range(3):
        ask(s, 1, begin=step)
        s.handle(ev.Tick(at=2.0 + step))
        up = [w.shape for w in s.cluster.workers.values() if not w.resting]
        gpus = [gpu for shape in up for gpu in range(shape.first, shape.first + shape.degree)]
        assert len(gpus) == len(set(gpus))
