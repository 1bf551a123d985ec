"""Policies that wait for whole batches: synchronous, dapo, tail_batching, one_step_off."""

from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from rose.parts.rivals.rollpacker import TailBatching
from rose.policies.dapo import Dapo
from rose.policies.verl import OneStepOff
from rose.scheduler import events as ev
from tests.scheduler.batches import Trainer


def admitted(actions):
    return [a.group for a in actions if isinstance(a, ev.AdmitGroup)]


def dropped(actions):
    return [a.group for a in actions if isinstance(a, ev.DropGroup)]


def trained(actions):
    return [a.groups for a in actions if isinstance(a, ev.StartTraining)]


def test_dapo_takes_the_groups_that_finish_first_replaces_refused_ones_and_drops_the_others():
    policy = Dapo(oversample=1.5, max_admitted=3.0)
    assert admitted(policy.begin(1, 4)) == ["g0", "g1", "g2", "g3", "g4", "g5"]
    assert admitted(policy.finished("g0", False)) == ["g6"], "six stay accepted or running"
    for group in ("g5", "g1", "g3"):
        assert policy.finished(group, True) == []
    actions = policy.finished("g4", True)
    assert dropped(actions) == ["g2", "g6", "g0"]
    assert trained(actions) == [["g1", "g3", "g4", "g5"]]


def test_dapo_fills_the_batch_with_refused_groups_at_its_limit_of_samples():
    policy = Dapo(oversample=1.0, max_admitted=2.0)
    policy.begin(1, 2)
    for group in ("g0", "g1", "g2"):
        actions = policy.finished(group, False)
    assert admitted(actions) == []
    assert trained(policy.finished("g3", True)) == [["g0", "g3"]]


def tail_batching():
    return TailBatching(speculation=1.25, spare=0.25, max_admitted=3.0)


def short_round(policy, step, late):
    """Play a short round for four groups. The policy starts five, each with a quarter more
    trajectories, and cancels the group `late`."""
    begun = policy.begin(step, 4)
    assert len(begun) == 5 and {action.spare for action in begun} == {0.25}
    for group in admitted(begun):
        if group != late:
            actions = policy.finished(group, True)
    assert dropped(actions) == [late]


def test_cancelled_prompts_that_fill_a_batch_make_a_long_round_also_after_a_restart():
    before = tail_batching()
    for step, late in enumerate(("g3", "g7", "g10", "g16"), 1):
        short_round(before, step, late)
    policy = tail_batching()
    policy.restore(before.snapshot())
    begun = policy.begin(5, 4)
    assert admitted(begun) == ["g3r1", "g7r1", "g10r1", "g16r1"]
    assert {action.spare for action in begun} == {0.0}
    for group in ("g16r1", "g10r1", "g3r1"):
        assert policy.finished(group, True) == []
    expected = [ev.StartTraining(5, ["g3r1", "g7r1", "g10r1", "g16r1"])]
    assert policy.finished("g7r1", True) == expected
    short_round(policy, 6, "g20")


def test_a_long_round_replaces_refused_groups_from_the_queue_first():
    policy = TailBatching(speculation=2.0, spare=0.0, max_admitted=3.0)
    # g2 and g3 are cancelled.
    (policy.begin(1, 2), policy.finished("g0", True), policy.finished("g1", True))
    policy.begin(2, 1)  # a long round of one
    assert admitted(policy.finished("g2r1", False)) == ["g3r1"]
    assert admitted(policy.finished("g3r1", False)) == ["g4"]


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_tail_batching_trains_every_prompt_however_slow(seed):
    trainer, random = Trainer(tail_batching, 8), Random(seed)
    for _ in range(60):
        trainer.run_step(random, slow=5)
    waiting = len(trainer.policy.snapshot()["again"])
    assert waiting < 8 + 2, "at most a batch, and the prompts of the last round"
    assert sum(fate != "trained" for fate in trainer.fate.values()) == waiting


def test_the_next_batch_is_admitted_when_this_one_trains_and_none_before_it_is_complete():
    policy = OneStepOff(max_admitted=3.0)
    assert admitted(policy.begin(1, 2)) == ["g0", "g1"]
    policy.finished("g1", True)
    actions = policy.finished("g0", True)
    assert trained(actions) == [["g0", "g1"]] and admitted(actions) == ["g2", "g3"]
    # The trainer is busy.
    assert policy.finished("g2", True) == [] and policy.finished("g3", True) == []
    actions = policy.begin(2, 2)
    assert trained(actions) == [["g2", "g3"]] and admitted(actions) == ["g4", "g5"]
