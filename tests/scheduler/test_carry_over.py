"""carry_over: no group is dropped or trained too late, and no group waits forever."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rose.policies.areal import BoundedStaleness
from rose.policies.carry_over import CarryOver
from rose.scheduler import events as ev

G = 4


class Trainer:
    """Driver of a policy, in place of the coordinator, whose groups finish in a given order."""

    def __init__(self, policy):
        self.policy, self.version, self.step = policy, 0, 0
        self.admitted, self.running, self.trained, self.staleness = {}, [], [], []
        self.waits = True  # True while the trainer is free
        self.take(policy.published(0))
        self.begin()

    def begin(self):
        self.take(self.policy.begin(self.step, G))

    def take(self, actions):
        for action in actions:
            match action:
                case ev.AdmitGroup(_, group):
                    assert group not in self.admitted
                    self.admitted[group] = self.version
                    self.running.append(group)
                case ev.StartTraining(step, groups):
                    assert self.waits and step == self.step and len(groups) == G
                    self.waits = False
                    self.trained += groups
                    self.staleness += [self.version - self.admitted[g] for g in groups]
                case ev.DropGroup(group):
                    assert group == self.refused, "only what the filter refuses is dropped"
                case _:
                    raise AssertionError(action)

    def finish(self, i, accepted=True):
        group = self.running.pop(i % len(self.running))
        self.refused = None if accepted else group
        self.take(self.policy.finished(group, accepted))

    def publish(self):
        self.version, self.step, self.waits = self.version + 1, self.step + 1, True
        self.take(self.policy.published(self.version))
        self.begin()


@settings(max_examples=100, deadline=None)
@given(
    st.sampled_from([(0, 0.0), (1, 0.25), (1, 1.0), (2, 1.5), (3, 3.0)]),
    st.lists(
        st.tuples(st.integers(0, 50), st.booleans(), st.integers(0, 9)), min_size=50, max_size=300
    ),
)
def test_for_any_order_of_finish_the_bound_holds_and_the_run_continues(numbers, events):
    staleness, carry = numbers
    run = Trainer(CarryOver(staleness, carry, 8.0))
    for which, train_is_over, refused in events:
        if not run.waits and (train_is_over or not run.running):
            run.publish()
        assert run.running, "nothing runs and the trainer waits"
        run.finish(which, accepted=refused > 0)
    assert len(run.trained) == len(set(run.trained))
    assert all(0 <= s <= staleness for s in run.staleness)
    left = [g for g in run.admitted if g not in run.trained]
    assert len(left) <= G * (1 + carry) + sum(refused == 0 for _, _, refused in events)
    while run.step < 3 + len(events) // G // 8:  # The run can still continue.
        run.publish() if not run.waits else run.finish(0)


def test_the_tail_of_a_step_is_trained_in_the_next_one():
    run = Trainer(CarryOver(1, 0.25, 8.0))
    assert len(run.running) == G + 1
    tail = run.running[0]
    for _ in range(G):
        run.finish(1)
    assert not run.waits and tail not in run.trained
    run.publish()
    for _ in range(G + 1):
        if run.waits:
            run.finish(len(run.running) - 1)
    assert tail in run.trained and max(run.staleness) == 1 and run.staleness.count(1) >= 1


def test_a_group_at_its_bound_is_waited_for():
    run = Trainer(CarryOver(1, 0.25, 8.0))
    tail = run.running[0]
    for _ in range(G):
        run.finish(1)
    run.publish()
    while len(run.running) > 1:
        run.finish(1)
    assert run.waits and run.running == [tail]
    run.finish(0)
    assert not run.waits


def test_without_staleness_it_is_synchronous():
    run = Trainer(CarryOver(0, 0.0, 8.0))
    for _ in range(3):
        assert len(run.running) == G
        while run.running:
            run.finish(0)
        run.publish()
    assert set(run.staleness) == {0}


def test_groups_in_flight_start_again_with_their_names_after_a_restart():
    run = Trainer(CarryOver(1, 1.0, 8.0))
    for _ in range(G):
        run.finish(0)
    state = run.policy.snapshot()
    again = CarryOver(1, 1.0, 8.0)
    again.restore(state)
    names = [a.group for a in again.begin(1, G)]
    assert names[:G] == [f"g{i}" for i in range(G, 2 * G)]
    assert names[G:] == [f"g{i}" for i in range(2 * G, 3 * G)]


@pytest.mark.parametrize("numbers", [(1, 2.0, 8.0), (0, 0.5, 8.0), (-1, 0.0, 8.0), (1, 1.0, 0.5)])
def test_numbers_that_make_no_policy_are_refused(numbers):
    with pytest.raises(ValueError, match="staleness"):
        CarryOver(*numbers)


def test_due_first_puts_groups_of_older_versions_first_at_any_order_of_arrival():
    from rose.policies.ours import DueFirst
    from rose.scheduler.state import Cluster, TurnState

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
    runs = (
        Trainer(CarryOver(staleness, float(staleness), 8.0)),
        Trainer(BoundedStaleness(staleness, 99.0, 8.0)),
    )
    for which, train_is_over in events:
        for run in runs:
            if not run.waits and (train_is_over or not run.running):
                run.publish()
        if not all(run.running for run in runs):
            return  # From here on the two policies wait for different groups.
        for run in runs:
            run.finish(which)
        assert (
            len({len(run.admitted) - len(run.trained) for run in runs}) == 1
            or runs[0].waits != runs[1].waits
        )
