"""torch.compile of the trainer's layers and head changes nothing but rounding, and compiles nothing
after the first step: the real compilers, DeepSpeed and gloo."""

import numpy as np
import pytest

from tests.trainer import tiny_world

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

# seeds of the batch (even: prefix trees), tokens of a micro-batch: rows of other numbers and lengths
# in each
STEPS = [[1, 4000, 1, 1], [2, 40, 1, 1], [3, 64, 1, 1], [4, 80, 1, 1], [5, 50, 1, 1]]


COMPILE_S = 1500  # of a busy machine


def run(folder, name, more):
    settings = ["deterministic=false", "trainer.zero_stage=1", *more]
    actions = [*(["train", *step] for step in STEPS), ["states", name]]
    job = {"name": name, "settings": settings, "actions": actions, "deadline_s": COMPILE_S}
    job["compiled_in"] = str(folder / "compiled")
    return tiny_world.run_world(job, folder, 1)[0]


def test_compiled_layers_train_what_others_do_and_none_is_compiled_later(tmp_path):
    tiny_world.save_model(tmp_path / "model")
    more = ["trainer.gradient_checkpointing=true"]
    plain = run(tmp_path, "plain", more)
    compiled = run(tmp_path, "compiled", [*more, "trainer.compile=true"])
    assert plain["compiled"] == [0] * (1 + len(STEPS))
    assert compiled["compiled"][0] >= 3, "before the first step"
    assert len(set(compiled["compiled"][1:])) == 1
    for found, exact in zip(compiled["metrics"], plain["metrics"], strict=True):
        for key in ("loss", "grad_norm", "entropy", "mismatch_kl"):
            assert found[key] == pytest.approx(exact[key], rel=1e-5, abs=1e-5), key
    states = [np.load(tmp_path / f"{name}-0.npz") for name in ("compiled", "plain")]
    for key in states[0].files:
        np.testing.assert_allclose(states[0][key], states[1][key], rtol=0, atol=1e-5, err_msg=key)
