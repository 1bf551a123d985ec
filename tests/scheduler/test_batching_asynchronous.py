"""Batching policies whose groups have several versions: bounded_staleness, trajectory_async."""

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rose.parts.rivals.rollart import TrajectoryAsync
from rose.policies.areal import BoundedStaleness
from tests.scheduler.batches import Trainer


@settings(max_examples=120, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    groups=st.integers(1, 7),
    eta=st.integers(0, 4),
    running=st.sampled_from([0.3, 1.0, 9.0]),
    refuses=st.sampled_from([0.0, 0.3, 1.0]),
    slow=st.sampled_from([0, 3, 11]),
    resumes=st.booleans(),
)
def test_bounded_staleness_keeps_its_bound(seed, groups, eta, running, refuses, slow, resumes):
    trainer = Trainer(lambda: BoundedStaleness(eta, running, max_admitted=3.0), groups)
    random = Random(seed)
    for _ in range(15):
        trainer.run_step(random, refuses, slow)
        if resumes and random.random() < 0.3:
            trainer.resume()
        trainer.check_accounts()
    assert len(trainer.trained) == 15
    assert max(trainer.staleness()) <= eta and not trainer.overdue(eta)
    assert refuses or not trainer.dropped


@settings(max_examples=120, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    groups=st.integers(1, 7),
    alpha=st.integers(1, 3),
    retries=st.integers(0, 2),
    refuses=st.sampled_from([0.0, 0.3, 1.0]),
    slow=st.sampled_from([0, 3, 11]),
    resumes=st.booleans(),
)
def test_trajectory_async_keeps_its_bound(seed, groups, alpha, retries, refuses, slow, resumes):
    trainer = Trainer(lambda: TrajectoryAsync(alpha, retries, max_admitted=3.0), groups)
    random = Random(seed)
    for _ in range(15):
        trainer.run_step(random, refuses, slow)
        if resumes and random.random() < 0.3:
            trainer.resume()
        trainer.check_accounts()
    assert len(trainer.trained) == 15
    assert max(trainer.staleness()) <= alpha and not trainer.overdue(alpha)


# --------------------------------------------------------------------------- bounded_staleness


def test_the_admission_rule_is_the_papers():
    """Assert floor((N_r - 1) / B) <= i + eta at any moment."""
    trainer, random = (
        Trainer(lambda: BoundedStaleness(eta=2, running=9.0, max_admitted=3.0), 3),
        Random(4),
    )
    for _ in range(10):
        trainer.begin()
        assert len(trainer.admitted) == 3 * (trainer.version + 2 + 1)
        while trainer.waits:
            trainer.finish_one(random, 0.0, 0)
        # The batch in the trainer still counts.
        assert len(trainer.admitted) == 3 * (trainer.version + 2 + 1)
        trainer.end_step()


def test_no_more_groups_run_than_allowed_and_one_that_is_admitted_late_has_a_late_version():
    trainer = Trainer(lambda: BoundedStaleness(eta=2, running=1.0, max_admitted=3.0), 2)
    trainer.begin()
    assert trainer.running == ["g0", "g1"]
    for group in ("g0", "g1", "g2", "g3"):
        trainer.finish(group)
    assert trainer.running == ["g4", "g5"], (
        "with those that wait for the trainer as many as eta allows"
    )
    trainer.end_step()
    trainer.begin()
    trainer.finish("g4"), trainer.finish("g5")
    assert trainer.running == ["g6", "g7"]
    for _ in range(2):
        trainer.end_step()
        trainer.begin()
    trainer.finish("g6"), trainer.finish("g7")
    assert trainer.trained[-1] == (3, ["g6", "g7"]) and trainer.staleness()[-2:] == [2, 2]


def test_eta_0_is_synchronous():
    trainer, random = (
        Trainer(lambda: BoundedStaleness(eta=0, running=9.0, max_admitted=3.0), 4),
        Random(1),
    )
    for step in range(1, 5):
        trainer.run_step(random)
        assert len(trainer.admitted) == 4 * (step + 1) - 4 * (step == 0)
        assert set(trainer.staleness()) == {0}


def test_a_step_takes_the_oldest_finished_groups():
    trainer = Trainer(lambda: BoundedStaleness(eta=2, running=9.0, max_admitted=3.0), 2)
    trainer.begin()  # admits g0 to g5
    for group in ("g5", "g4"):
        trainer.finish(group)
    assert trainer.trained == [(0, ["g4", "g5"])]
    for group in ("g3", "g2", "g1"):
        trainer.finish(group)
    trainer.end_step()
    trainer.begin()
    assert trainer.trained[-1] == (1, ["g1", "g2"])


def test_a_batch_waits_for_groups_that_later_batches_could_not_take_in_time():
    trainer = Trainer(lambda: BoundedStaleness(eta=1, running=9.0, max_admitted=3.0), 2)
    trainer.begin()  # admits g0 to g3
    trainer.finish("g2"), trainer.finish("g3")
    trainer.end_step()  # version 1; admits g4 and g5
    trainer.begin()
    trainer.finish("g4"), trainer.finish("g5"), trainer.finish("g0")
    assert trainer.waits, "g1 would be two versions old at the next step"
    trainer.finish("g1")
    assert trainer.trained[-1] == (1, ["g0", "g1"])


def test_refused_groups_are_used_when_too_many_were_refused():
    trainer = Trainer(lambda: BoundedStaleness(eta=1, running=9.0, max_admitted=2.0), 2)
    trainer.begin()
    for group in ("g0", "g1"):
        trainer.finish(group, accepted=False)
    assert trainer.running == ["g2", "g3", "g4", "g5"], "refused groups were replaced"
    for group in ("g2", "g3"):
        trainer.finish(group, accepted=False)
    assert trainer.trained == [(0, ["g2", "g3"])]


# --------------------------------------------------------------------------- trajectory_async


def test_as_many_groups_run_as_a_batch_has_until_the_buffer_is_full():
    trainer = Trainer(lambda: TrajectoryAsync(alpha=1, retries=1, max_admitted=3.0), 2)
    trainer.begin()
    assert trainer.running == ["g0", "g1"]
    trainer.finish("g1")
    assert trainer.running == ["g0", "g2"]
    trainer.finish("g2")
    # The trainer trains.
    assert trainer.trained == [(0, ["g1", "g2"])] and trainer.running == ["g0", "g3"]
    trainer.finish("g3"), trainer.finish("g4"), trainer.finish("g5")
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


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: BoundedStaleness(eta=-1, running=1.0, max_admitted=2.0), "eta=-1"),
        (lambda: BoundedStaleness(eta=1, running=0.0, max_admitted=2.0), "running=0"),
        (lambda: TrajectoryAsync(alpha=0, retries=1, max_admitted=2.0), "alpha=0.*synchronous"),
        (lambda: TrajectoryAsync(alpha=1, retries=-1, max_admitted=2.0), "retries=-1"),
    ],
)
def test_bounds_that_make_no_sense_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
