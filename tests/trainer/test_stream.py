"""A step whose groups come in rounds has the gradient of the step at once: every algorithm, every
ZeRO stage, real ranks."""

import numpy as np
import pytest

from tests.trainer import tiny_world

pytestmark = pytest.mark.slow

GRPO = {"clip_low": 0.2, "clip_high": 0.2, "scale_by_std": True}
DAPO = {"clip_low": 0.2, "clip_high": 0.28, "max_response_tokens": 30, "overlong_buffer": 20}
ALGORITHMS = [
    ["grpo", GRPO, 1, "pairs"],
    ["grpo", GRPO, 2, "pairs"],
    ["turn_grpo", GRPO | {"gamma": 0.9, "trajectory_weight": 0.25}, 1, "pairs"],
    ["tree_grpo", GRPO, 1, "forked"],
    ["tree_grpo", GRPO, 2, "late"],
    ["dapo", DAPO | {"overlong_filtering": False}, 1, "pairs"],
    ["dapo", DAPO | {"overlong_filtering": True}, 2, "pairs"],
    ["rloo", {"clip_low": None, "clip_high": None}, 1, "pairs"],
    ["gspo", {"clip_low": 3e-4, "clip_high": 4e-4}, 1, "pairs"],
    ["decoupled_ppo", GRPO | {"weight_cap": 5.0}, 1, "pairs"],
]
ROUNDS = {
    "pairs": [[0, 1], [2, 3, 4, 5], [6, 7]],
    "forked": [[0, 1, 2, 3], [4, 5, 6, 7]],
    "late": [[0, 1, 2, 3], [4, 5, 6, 7]],
}
LIMIT = 64  # several micro-batches in a round
WHOLE = [list(range(8))]


@pytest.mark.parametrize(
    ("stage", "ranks", "clip"), [(0, 1, 0.05), (1, 2, 1e6), (2, 2, 0.05), (3, 2, 0.05)]
)
def test_a_step_in_rounds_has_the_gradient_of_the_step_at_once(stage, ranks, clip, tmp_path):
    tiny_world.save_model(tmp_path / "model")
    actions = [["publish", 0], ["save"]]
    for number, (name, args, seed, kind) in enumerate(ALGORITHMS):
        for way, rounds in (("once", WHOLE), ("rounds", ROUNDS[kind])):
            step = ["rounds", name, args, seed, kind, rounds, LIMIT, f"{way}{number}"]
            actions += [["load"], step]
    job = {
        "name": "run",
        "settings": [
            f"trainer.zero_stage={stage}",
            "algorithm.kl_coef=0.5",
            f"trainer.optimizer.grad_clip={clip}",
        ],
        "actions": actions,
    }
    metrics = tiny_world.run_world(job, tmp_path, ranks)[0]["metrics"]
    pairs = zip(metrics[::2], metrics[1::2], strict=True)
    for number, (once, rounds) in enumerate(pairs):
        case = ALGORITHMS[number]
        for rank in range(ranks):
            whole = np.load(tmp_path / f"once{number}-{rank}.npz")
            parts = np.load(tmp_path / f"rounds{number}-{rank}.npz")
            size = np.sqrt(sum(np.square(whole[name]).sum() for name in whole.files))
            apart = np.sqrt(sum(np.square(whole[n] - parts[n]).sum() for n in whole.files))
            print(case[0], apart / size)
            assert size > 1e-3 and apart <= 1e-6 * size, (case, apart / size)
        assert once["grad_norm"] == pytest.approx(size, rel=1e-5), case
        for name, value in once.items():
            if not name.startswith("seconds_"):
                assert rounds[name] == pytest.approx(value, rel=1e-5, abs=1e-7), (case, name)
