"""carry_over: no group is dropped or trained too late, and no group waits forever."""

from hypothesis import given, settings
from hypothesis import strategies as st

from rose.policies.areal import BoundedStaleness
from rose.policies.carry_over import CarryOver
from rose.policies.ours import DueFirst
from rose.scheduler import events as ev
from rose.scheduler.state import Cluster, TurnState
from tests.scheduler.batches import Trainer

G = 4


def begun(policy, *args):
    """In its first step."""
    trainer = Trainer(lambda: policy(*args, max_admitted=8.0), G)
    trainer.begin()
    return trainer


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


def test_without_staleness_it_is_synchronous():
    run = begun(CarryOver, 0, 0.0)
    for _ in range(3):
        assert len(run.running) == G
        run.finish(*run.running)
        run.next_step()
    assert set(run.staleness()) == {0}


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
