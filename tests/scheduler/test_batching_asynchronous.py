"""Batching policies whose groups have several versions: bounded_staleness, trajectory_async,
carry_over; and the order due_first."""

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rose.parts.rivals.rollart import TrajectoryAsync
from rose.policies.areal import BoundedStaleness
from rose.policies.carry_over import CarryOver
from rose.policies.ours import DueFirst
from rose.scheduler import events as ev
from rose.scheduler.state import Cluster, TurnState
from tests.scheduler.batches import Trainer

G = 4  # groups of a batch of carry_over


def begun(policy, *args, groups=G, max_admitted=8.0):
    """A run in its first step."""
    trainer = Trainer(lambda: policy(*args, max_admitted=max_admitted), groups)
    trainer.begin()
    return trainer


def bounded(groups, eta, running=9.0, max_admitted=3.0):
    return begun(BoundedStaleness, eta, running, groups=groups, max_admitted=max_admitted)


@pytest.mark.parametrize("eta", [0, 2])
def test_the_admission_rule_is_the_papers(eta):
    """Assert floor((N_r - 1) / B) <= i + eta at any moment."""
    trainer, random = bounded(groups=3, eta=eta), Random(4)
    for _ in range(10):
        assert len(trainer.admitted) == 3 * (trainer.version + eta + 1)
        while trainer.waits:
            trainer.finish_one(random, 0.0, 0)
        # The batch in the trainer still counts.
        assert len(trainer.admitted) == 3 * (trainer.version + eta + 1)
        trainer.next_step()


def test_no_more_groups_run_than_allowed_and_one_that_is_admitted_late_has_a_late_version():
    trainer = bounded(groups=2, eta=2, running=1.0)
    assert trainer.running == ["g0", "g1"]
    trainer.finish("g0", "g1", "g2", "g3")
    assert trainer.running == ["g4", "g5"], "with those that wait as many as eta allows"
    trainer.next_step()
    trainer.finish("g4", "g5")
    assert trainer.running == ["g6", "g7"]
    trainer.next_step()
    trainer.next_step()
    trainer.finish("g6", "g7")
    assert trainer.trained[-1] == (3, ["g6", "g7"]) and trainer.staleness()[-2:] == [2, 2]


def test_a_step_takes_the_oldest_finished_groups():
    trainer = bounded(groups=2, eta=2)  # admits g0 to g5
    trainer.finish("g5", "g4")
    assert trainer.trained == [(0, ["g4", "g5"])]
    trainer.finish("g3", "g2", "g1")
    trainer.next_step()
    assert trainer.trained[-1] == (1, ["g1", "g2"])


def test_a_batch_waits_for_groups_that_later_batches_could_not_take_in_time():
    trainer = bounded(groups=2, eta=1)  # admits g0 to g3
    trainer.finish("g2", "g3")
    trainer.next_step()  # version 1; admits g4 and g5
    trainer.finish("g4", "g5", "g0")
    assert trainer.waits, "g1 would be two versions old at the next step"
    trainer.finish("g1")
    assert trainer.trained[-1] == (1, ["g0", "g1"])


def test_refused_groups_are_used_when_too_many_were_refused():
    trainer = bounded(groups=2, eta=1, max_admitted=2.0)
    trainer.finish("g0", "g1", accepted=False)
    assert trainer.running == ["g2", "g3", "g4", "g5"], "refused groups were replaced"
    trainer.finish("g2", "g3", accepted=False)
    assert trainer.trained == [(0, ["g2", "g3"])]


def test_as_many_groups_run_as_a_batch_has_until_the_buffer_is_full():
    trainer = begun(TrajectoryAsync, 1, 1, groups=2, max_admitted=3.0)
    assert trainer.running == ["g0", "g1"]
    trainer.finish("g1")
    assert trainer.running == ["g0", "g2"]
    trainer.finish("g2")
    # The trainer trains.
    assert trainer.trained == [(0, ["g1", "g2"])] and trainer.running == ["g0", "g3"]
    trainer.finish("g3", "g4", "g5")
    assert trainer.running == ["g0"], "with the buffer's groups two batches are admitted"


def test_groups_that_are_too_old_are_aborted_and_start_again_as_often_as_allowed():
    trainer = Trainer(lambda: TrajectoryAsync(alpha=1, retries=1, max_admitted=3.0), 2)
    names = []
    for _ in range(8):  # The group of prompt 0 never ends.
        trainer.begin()
        while trainer.waits:
            trainer.finish(next(g for g in trainer.running if not g.startswith("g0")))
        names += [g for g in trainer.running if g.startswith("g0")]
        trainer.end_step()
    assert list(dict.fromkeys(names)) == ["g0", "g0r1"] and trainer.fate[0] == "dropped"
    assert max(trainer.staleness()) <= 1


def test_the_tail_of_a_step_is_trained_in_the_next_one():
    run = begun(CarryOver, 1, 0.25)
    assert len(run.running) == G + 1
    tail = run.running[0]
    run.finish(*run.running[1:])
    assert run.running == [tail] and not run.waits
    run.next_step()
    while run.running != [tail]:
        run.finish(run.running[-1])
    assert run.waits, "the group is at its bound"
    run.finish(tail)
    assert not run.waits and tail in run.trained[1][1] and max(run.staleness()) == 1


def test_groups_in_flight_start_again_with_their_names_after_a_restart():
    run = begun(CarryOver, 1, 1.0)
    run.finish(*run.running[:G])
    state = run.policy.snapshot()
    again = CarryOver(1, 1.0, 8.0)
    again.restore(state)
    names = [a.group for a in again.begin(1, G)]
    assert names[:G] == [f"g{i}" for i in range(G, 2 * G)]
    assert names[G:] == [f"g{i}" for i in range(2 * G, 3 * G)]


def test_due_first_puts_groups_of_older_versions_first_at_any_order_of_arrival():
    order, cluster = DueFirst(), Cluster(version=3)

    def key(group):
        return order.key(TurnState(f"{group}.0.t0", f"{group}.0", group, 1, 1, 0, 0.0), cluster)

    old = key("g0")
    cluster.version = 4
    assert key("g0") == old < key("g1")
    order.on_event(ev.GroupFinished(at=0.0, group="g0", accepted=True), cluster)
    assert key("g0") == key("g1")


@settings(max_examples=50, deadline=None)
@given(
    st.integers(1, 3),
    st.lists(st.tuples(st.integers(0, 50), st.booleans()), min_size=30, max_size=150),
)
def test_with_carry_equal_to_the_bound_admissions_are_areals(staleness, events):
    """At every moment neither policy has admitted more groups, without the trainer's own batch."""
    runs = begun(CarryOver, staleness, float(staleness)), begun(BoundedStaleness, staleness, 99.0)
    for which, train_is_over in events:
        for run in runs:
            if not run.waits and (train_is_over or not run.running):
                run.next_step()
        if not all(run.running for run in runs):
            return  # From here on the two policies wait for different groups.
        for run in runs:
            run.finish(run.running[which % len(run.running)])
        ahead = {len(run.admitted) - G * len(run.trained) for run in runs}
        assert len(ahead) == 1 or runs[0].waits != runs[1].waits
