"""Batching policies whose groups have several versions: bounded_staleness, trajectory_async."""

from random import Random

import pytest

from rose.parts.rivals.rollart import TrajectoryAsync
from rose.policies.areal import BoundedStaleness
from tests.scheduler.batches import Trainer


def bounded(groups, eta, running=9.0, max_admitted=3.0):
    """In its first step."""
    trainer = Trainer(lambda: BoundedStaleness(eta, running, max_admitted), groups)
    trainer.begin()
    return trainer


# --------------------------------------------------------------------------- bounded_staleness


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
