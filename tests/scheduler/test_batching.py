"""Whatever order groups end in, whichever of them the filter refuses, and wherever a run ends and
resumes: no batching policy loses a prompt, trains one twice or too late, or waits forever; and a
step trains each group that it was said to train."""

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rose.policies.registry import policies
from rose.scheduler import events as ev
from tests.scheduler.batches import Trainer
from tests.scheduler.test_properties import scheduler

# The arguments of each policy before `max_admitted`.
ARGS = {
    "synchronous": st.just(()),
    "dapo": st.just((1.5,)),
    "tail_batching": st.just((1.25, 0.25)),
    "one_step_off": st.just(()),
    "bounded_staleness": st.tuples(st.integers(0, 4), st.sampled_from([0.3, 1.0, 9.0])),
    "trajectory_async": st.tuples(st.integers(1, 3), st.integers(0, 2)),
    "carry_over": st.sampled_from([(0, 0.0), (1, 0.25), (1, 1.0), (2, 1.5), (3, 3.0)]),
}
DROP_NOTHING = ("synchronous", "one_step_off", "bounded_staleness", "carry_over")


@pytest.mark.parametrize("name", sorted(policies("batching")))
@settings(max_examples=120, deadline=None)
@given(
    data=st.data(),
    seed=st.integers(0, 10**6),
    groups=st.integers(1, 9),
    refuses=st.sampled_from([0.0, 0.3, 1.0]),
    slow=st.sampled_from([0, 3, 11]),
    resumes=st.booleans(),
)
def test_prompts_and_staleness_are_accounted_for(name, data, seed, groups, refuses, slow, resumes):
    """`Trainer` has more assertions, about each action."""
    args = data.draw(ARGS[name], "arguments")
    trainer = Trainer(lambda: policies("batching")[name](*args, max_admitted=3.0), groups)
    bound, random = trainer.policy.staleness, Random(seed)
    for _ in range(15):
        trainer.run_step(random, refuses, slow)
        if resumes and random.random() < 0.3:
            trainer.resume()
        trainer.check_accounts()
    assert len(trainer.trained) == 15
    assert max(trainer.staleness()) <= bound and not trainer.overdue(bound)
    if not refuses:
        assert name not in DROP_NOTHING or not trainer.dropped
        assert groups < 5 or trainer.early, "no step knew of any group before its batch was there"


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
