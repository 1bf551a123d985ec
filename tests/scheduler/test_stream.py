"""`certain`: every batching policy names groups that a step will train before its batch is complete,
as early as possible, and trains all of them."""

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rose.parts.rivals.rollart import TrajectoryAsync
from rose.parts.rivals.rollpacker import TailBatching
from rose.policies.areal import BoundedStaleness
from rose.policies.carry_over import CarryOver
from rose.policies.dapo import Dapo
from rose.policies.registry import policies
from rose.policies.verl import OneStepOff, Synchronous
from rose.scheduler import events as ev
from tests.scheduler.batches import Trainer
from tests.scheduler.test_properties import scheduler

MADE = {
    "synchronous": lambda: Synchronous(3.0),
    "dapo": lambda: Dapo(1.5, 3.0),
    "tail_batching": lambda: TailBatching(1.25, 0.25, 3.0),
    "one_step_off": lambda: OneStepOff(3.0),
    "bounded_staleness": lambda: BoundedStaleness(2, 1.5, 3.0),
    "trajectory_async": lambda: TrajectoryAsync(1, 1, 3.0),
    "carry_over": lambda: CarryOver(2, 1.5, 3.0),
}


@pytest.mark.parametrize("name", sorted(policies("batching")))
@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    refuses=st.sampled_from([0.0, 0.3, 1.0]),
    slow=st.sampled_from([0, 3]),
    resumes=st.booleans(),
)
def test_groups_reported_as_certain_are_in_the_batch(name, seed, refuses, slow, resumes):
    trainer, random = Trainer(MADE[name], 5), Random(seed)
    for _ in range(10):
        trainer.run_step(random, refuses, slow)  # `Trainer` has the assertions.
        if resumes and random.random() < 0.3:
            trainer.resume()
    assert refuses or trainer.early


def train(name: str, finishes: list[tuple[str, bool]], stream: bool = True) -> list:
    """Return the actions about training if groups finish in this order; three make a batch."""
    names = {"provisioning": "fixed", "routing": "least_loaded", "order": "fifo"}
    made = scheduler(names | {"batching": name, "placement": "stay"}, 1.0)
    made.handle(ev.VersionPublished(at=0.0, version=0))
    events = [ev.StepBegun(at=0.0, step=1, groups=3, stream=stream)]
    events += [ev.GroupFinished(at=1.0, group=group, accepted=ok) for group, ok in finishes]
    actions = [action for event in events for action in made.handle(event)]
    return [a for a in actions if isinstance(a, ev.TrainGroup | ev.StartTraining)]


def test_a_synchronous_step_takes_every_accepted_group_at_once():
    finishes = [("g1", True), ("g2", False), ("g3", True), ("g0", True)]
    early = [ev.TrainGroup(1, "g1"), ev.TrainGroup(1, "g3")]
    whole = ev.StartTraining(1, ["g0", "g1", "g3"])
    assert train("synchronous", finishes) == [*early, whole]
    assert train("synchronous", finishes, stream=False) == [whole]


def test_an_asynchronous_step_streams_groups_that_no_older_group_can_displace():
    """g3 becomes certain when g0 is refused, because g0, g1 and g2 precede it."""
    finishes = [("g1", True), ("g3", True), ("g0", False), ("g2", True)]
    answers = train("bounded_staleness", finishes)
    assert answers[:2] == [ev.TrainGroup(1, "g1"), ev.TrainGroup(1, "g3")]
    assert answers[2:] == [ev.StartTraining(1, ["g1", "g2", "g3"])]


def test_one_step_off_streams_groups_that_finished_while_the_trainer_was_busy():
    policy = OneStepOff(3.0)
    trainer = Trainer(lambda: policy, 3)
    trainer.begin()
    for group in ("g0", "g1", "g2"):
        trainer.finish(group)
    trainer.finish("g4")
    assert policy.certain() == [], "the trainer still has the last batch"
    trainer.end_step()
    trainer.begin()
    assert policy.certain() == ["g4"]
