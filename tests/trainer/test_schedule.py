"""Learning rates follow the number of the update alone."""

import math

import pytest

from rose.trainer.schedule import learning_rates

LR = 1e-3


@pytest.fixture
def rates(make_config):
    def of(*overrides, updates=1):
        keys = [f"optimizer.{each}" for each in (f"lr={LR}", "schedule=constant", *overrides)]
        keys += ["steps=10", f"updates_per_step={updates}"]
        rate = learning_rates(make_config(*(f"trainer.{key}" for key in keys)).trainer)
        return [rate(n) / LR for n in range(10 * updates)]

    return of


def test_a_constant_one_is_linear_warm_up_and_then_the_same_for_ever(rates):
    assert rates("warmup_steps=4") == pytest.approx([0.25, 0.5, 0.75] + [1.0] * 7)
    assert rates("warmup_steps=0", "final_share=0.5") == [1.0] * 10


def test_a_linear_one_falls_evenly_and_its_last_update_still_learns(rates):
    found = rates("warmup_steps=2", "schedule=linear")
    assert found == pytest.approx([0.5, 1.0, *(1 - n / 9 for n in range(1, 9))])
    assert 0 < found[-1] == pytest.approx(1 / 9)


def test_a_cosine_falls_to_its_final_share_over_all_updates_of_all_steps(rates):
    found = rates("warmup_steps=0", "schedule=cosine", "final_share=0.1", updates=2)
    halves = [(1 + math.cos(math.pi * n / 21)) / 2 for n in range(1, 21)]
    assert found == pytest.approx([0.1 + 0.9 * half for half in halves])


def test_warm_up_begins_at_nothing_whatever_the_final_share(rates):
    expected = pytest.approx([0.25, 0.5, 0.75, 1.0])
    assert rates("warmup_steps=4", "schedule=linear", "final_share=0.5")[:4] == expected
