"""A run goes on with other trainer ranks and at another ZeRO stage as if it had always had them: the
real trainer, DeepSpeed and gloo."""

import numpy as np
import pytest

from tests.trainer import tiny_world
from tests.trainer.test_lora import LORA

pytestmark = pytest.mark.slow

STEPS = [[1, 4000, 1, 1], [2, 40, 1, 1], [3, 100, 1, 1]]  # as test_trainer's
ALWAYS = (2, 3)  # ZeRO's stage and ranks of the run that nothing interrupts


def step(number):
    return ["train", *STEPS[number]], ["states", f"{number}"], ["save", f"step{number}"]


def run(folder, name, world, actions, lora):
    stage, ranks = world
    settings = [f"trainer.zero_stage={stage}", *([LORA] if lora else [])]
    job = {"name": name, "settings": settings, "actions": actions}
    return tiny_world.run_world(job, folder, ranks)[0]["metrics"]


@pytest.fixture(scope="module")
def always(tmp_path_factory):
    """(its folder with a checkpoint of each step, metrics of each) of the uninterrupted run."""
    known = {}

    def get(lora):
        if lora not in known:
            folder = tmp_path_factory.mktemp("always")
            tiny_world.save_model(folder / "model")
            actions = [action for number in range(3) for action in step(number)]
            known[lora] = folder, run(folder, "always", ALWAYS, actions, lora)
        return known[lora]

    return get


@pytest.mark.parametrize(
    ("begins", "worlds", "lora"),
    [
        ((1, 1), [(1, 2), (1, 3)], False),
        (ALWAYS, [(2, 1)], False),
        (ALWAYS, [(3, 2), (3, 3)], False),
        (ALWAYS, [(3, 2)], True),
    ],
    ids=["zero1-grows", "zero2-shrinks", "zero2-to-3", "lora"],
)
def test_it_goes_on_as_if_it_had_always_had_these_ranks(begins, worlds, lora, always, tmp_path):
    whole, expected = always(lora)
    at = whole
    tiny_world.save_model(tmp_path / "model")
    if begins != ALWAYS:
        at = tmp_path
        run(at, "begins", begins, step(0), lora)
    for number, world in enumerate(worlds, 1):
        actions = [["load", str(at / f"step{number - 1}")], ["states", "loaded"], *step(number)]
        [metrics] = run(tmp_path, f"world{number}", world, actions, lora)
        saved, loaded = states(at, number - 1), states(tmp_path, "loaded")
        assert saved.keys() == loaded.keys()
        for name, values in saved.items():
            assert values.tobytes() == loaded[name].tobytes(), name
        for key in ("loss", "grad_norm", "lr"):
            assert metrics[key] == pytest.approx(expected[number][key], abs=1e-5)
        trained = states(whole, number)
        for name, values in states(tmp_path, number).items():
            np.testing.assert_allclose(values, trained[name], rtol=0, atol=1e-6, err_msg=name)
            assert name.endswith("norm.weight") or not np.array_equal(values, saved[name])
        at = tmp_path


def states(folder, name):
    """What tiny_world has written of all weights and moments."""
    return dict(np.load(folder / f"{name}-0.npz"))
