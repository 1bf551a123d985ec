"""torch.compile of the trainer's layers and head changes nothing but rounding, and compiles nothing
after the first step: the real compilers, DeepSpeed and gloo."""

import numpy as np
import pytest

from rose.trainer.kernels import MOST_FORMS
from tests.trainer import tiny_world

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

SOAK = pytest.mark.soak  # each takes minutes, and the two others have what they have
COMPILE_S = 1500  # of a busy machine
LENGTHS = [2 * length for length in tiny_world.LENGTHS]  # long enough for two ranks
# seeds of the batch (even: prefix trees), tokens of a micro-batch: rows of other numbers and lengths
# in each
STEPS = [[1, 4000, 1, 1], [2, 80, 1, 1], [3, 128, 1, 1], [4, 160, 1, 1], [5, 100, 1, 1]]
TRAIN = [["train", *step] for step in STEPS]
ACTIONS = [*TRAIN[:3], ["checkpointing"], *TRAIN[3:]]
LORA = "trainer.lora={rank: 4, alpha: 6, targets: [q_proj, v_proj, down_proj]}"
ADAPTER = [LORA, "algorithm.kl_coef=0.5"]  # whose reference is the model below it


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """What torch has compiled for one test here others need not compile again."""
    return tmp_path_factory.mktemp("kept")


def run(folder, name, ranks, more, kept):
    actions = [*ACTIONS, ["states", name]]
    settings = ["deterministic=false", "trainer.gradient_checkpointing=false", *more]
    job = {"name": name, "settings": settings, "actions": actions, "deadline_s": COMPILE_S}
    job |= {"compiled_in": str(kept), "lengths": LENGTHS, "gradients": True}
    job |= {"keeps_below": 64, "as_large": True}
    return tiny_world.run_world(job, folder, ranks)


@pytest.mark.parametrize(
    "ranks, more, second",
    [
        pytest.param(1, ["trainer.zero_stage=1"], [], id="zero1"),
        pytest.param(2, ["trainer.zero_stage=3", *ADAPTER], [], id="zero3-lora"),
        pytest.param(2, ["trainer.zero_stage=3"], [], id="zero3", marks=SOAK),
        # a second copy of the weights changes nothing either
        pytest.param(4, ["trainer.zero_stage=3"], ["trainer.hpz=2"], id="zero3-hpz", marks=SOAK),
        pytest.param(1, ["trainer.zero_stage=2", *ADAPTER], [], id="zero2-lora", marks=SOAK),
    ],
)
def test_compiled_layers_train_what_others_do(tmp_path, ranks, more, second, kept):
    tiny_world.save_model(tmp_path / "model")
    plain = run(tmp_path, "plain", ranks, more, kept)
    compiled = run(tmp_path, "compiled", ranks, [*more, *second, "trainer.compile=true"], kept)
    for ours, theirs in zip(compiled, plain, strict=True):
        assert theirs["compiled"] == [0] * (1 + len(STEPS)) and theirs["forms"] == [0, 0]
        assert ours["compiled"][0] >= 3, "before the first step"
        assert len(set(ours["compiled"][1:])) == 1
        assert all(0 < count < MOST_FORMS for count in ours["forms"]), ours["forms"]
        for found, exact in zip(ours["metrics"], theirs["metrics"], strict=True):
            for key in ("loss", "grad_norm", "entropy", "mismatch_kl"):
                assert found[key] == pytest.approx(exact[key], rel=1e-5, abs=1e-5), key
    for what in ("gradients-", ""):
        ours, theirs = (np.load(tmp_path / f"{name}-{what}0.npz") for name in ("compiled", "plain"))
        assert set(ours.files) == set(theirs.files)
        for key in theirs.files:
            largest = max(np.abs(theirs[key]).max(), 1e-5)
            atol = 1e-5 * largest
            np.testing.assert_allclose(ours[key], theirs[key], rtol=0, atol=atol, err_msg=key)
