"""ZeRO-3 with a second copy of the weights in groups of ranks (DeepSpeed's hpZ, on gloo) equals
ZeRO-3 without."""

import numpy as np
import pytest

from rose.transfer.receive import materialise
from tests.trainer import tiny_world

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

RANKS, GROUP, STEP_S = 4, 2, 150.0
LAST = [4, 64, 1, 1]
ACTIONS = [["publish", 0], ["train", 1, 4000, 1, 1]]
ACTIONS += [["train", 2, 40, 2, 1], ["publish", 1]]  # prefix trees, two updates
ACTIONS += [["states", "saved"], ["save"], ["train", *LAST, 2], ["publish", 2], ["states", "last"]]
AGAIN = [["load"], ["turn"], ["train", *LAST, 3], ["publish", 3], ["states", "again"]]


def run(folder, more, actions, keeps_below):
    shared = ["algorithm.kl_coef=0.5", "trainer.zero_stage=3", f"trainer.step_timeout_s={STEP_S:g}"]
    job = {"name": "run", "settings": [*shared, *more], "actions": actions}
    job["keeps_below"] = keeps_below
    return tiny_world.run_world(job, folder, RANKS)


def states(folder, name):
    return dict(np.load(folder / f"{name}-0.npz"))


# The first keeps norms gathered, as ZeRO-3 does with what is small: below its own threshold this
# model would be kept whole.
@pytest.mark.parametrize(
    "more, keeps_below",
    [((), 64), (("+trainer.lora={rank: 4, alpha: 8, targets: [q_proj, down_proj]}",), 0)],
)
def test_groups_with_all_weights_do_what_zero_3_does(tmp_path, more, keeps_below):
    plain, grouped = tmp_path / "plain", tmp_path / "grouped"
    for folder in (plain, grouped):
        tiny_world.save_model(folder / "model")
    exact = run(plain, more, ACTIONS, keeps_below)
    found = run(grouped, [*more, f"trainer.hpz={GROUP}"], [*ACTIONS, *AGAIN], keeps_below)
    for ours, theirs in zip(found, exact, strict=True):
        assert set(ours["limits_s"]) == {STEP_S}  # the groups', too
        for a, b in zip(ours["metrics"], theirs["metrics"], strict=False):
            for key in ("loss", "grad_norm", "entropy", "reference_kl"):
                assert a[key] == pytest.approx(b[key], rel=1e-6, abs=1e-6), key
        # each rank keeps its part of all weights while gradients are computed
        assert not any(theirs["second"])
        assert min(ours["second"]) >= 4 * ours["parameters"] / GROUP * 0.9
    for name in ("saved", "last"):
        for key, values in states(plain, name).items():
            np.testing.assert_allclose(states(grouped, name)[key], values, rtol=0, atol=1e-6)
    again = states(grouped, "again")
    for key, values in states(grouped, "last").items():
        assert values.tobytes() == again[key].tobytes(), key
    for version in (2, 3):  # what was published is what was trained
        published = materialise(grouped / "run", version)
        for key, values in published.items() if not more else ():
            assert values.numpy().tobytes() == again[key].tobytes(), key
