"""Ranks that share each row's sequence (DeepSpeed's Ulysses, gloo) equal one rank that has it
whole."""

import numpy as np
import pytest
from safetensors.torch import load_file

from rose.transfer.receive import materialise
from tests.trainer import tiny_world
from tests.trainer.test_stream import DAPO, GRPO, ROUNDS, WHOLE, compare

pytestmark = pytest.mark.slow

# algorithm, its arguments, seed (even: prefix trees), kind of batch, rounds
CASES = [
    ["grpo", GRPO, 1, "pairs", WHOLE],
    ["gspo", {"clip_low": 3e-4, "clip_high": 4e-4}, 1, "pairs", WHOLE],  # by ratios of whole rows
    ["dapo", DAPO | {"overlong_filtering": True}, 2, "pairs", ROUNDS["pairs"]],
    ["tree_grpo", GRPO, 2, "forked", WHOLE],
]
LIMIT = 64
ACTIONS = [["publish", 0], ["save"]]
for number, case in enumerate(CASES):
    ACTIONS += [["load"], ["rounds", *case, LIMIT, f"case{number}"]]
ACTIONS += [["publish", 1], ["save"], ["train", 3, LIMIT, 2, 1], ["publish", 2]]
RESUMED = [["load"], ["train", 3, LIMIT, 2, 1], ["publish", 2]]
# of them, that compute a row together, ZeRO stage, more settings
WORLDS = [
    (2, 2, 1, []),
    (4, 2, 3, ["trainer.gradient_checkpointing=true"]),
    (4, 4, 2, []),  # with two key-value heads
]


def run(folder, name, actions, ranks=1, parts=1, stage=0, more=()):
    settings = [
        *more,
        "algorithm.kl_coef=0.5",
        f"trainer.zero_stage={stage}",
        f"trainer.sequence_parallel={parts}",
    ]
    job = {"name": name, "settings": settings, "actions": actions}
    return tiny_world.run_world(job, folder, ranks)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """One rank's folder and metrics."""
    folder = tmp_path_factory.mktemp("alone")
    tiny_world.save_model(folder / "model")
    return folder, run(folder, "run", ACTIONS)[0]["metrics"]


@pytest.mark.parametrize(("ranks", "parts", "stage", "more"), WORLDS)
def test_it_equals_one_rank(ranks, parts, stage, more, alone, tmp_path):
    folder, expected = alone
    tiny_world.save_model(tmp_path / "model")
    reports = run(tmp_path, "run", ACTIONS, ranks, parts, stage, more)
    for report in reports:
        for found, wanted in zip(report["metrics"], expected, strict=True):
            for name in [name for name in wanted if not name.startswith("seconds_")]:
                assert found[name] == pytest.approx(wanted[name], rel=1e-5, abs=1e-6), name
    for rank in range(ranks):
        for number in range(len(CASES)):
            whole, parts_ = (
                np.load(f / f"case{number}-{r}.npz") for f, r in ((folder, 0), (tmp_path, rank))
            )
            names = [name for name in whole.files if not name.endswith(" after")]
            size = np.sqrt(sum(np.square(whole[n]).sum() for n in names))
            apart = np.sqrt(sum(np.square(whole[n] - parts_[n]).sum() for n in names))
            print(rank, number, size, apart / size)
            assert apart < 1e-5 * size
