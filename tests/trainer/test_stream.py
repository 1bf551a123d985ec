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
ROUNDS = {"pairs": [[0, 1], [2, 3, 4, 5], [6, 7]]}
ROUNDS |= dict.fromkeys(("forked", "late"), [[0, 1, 2, 3], [4, 5, 6, 7]])
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
    rounds = ["rounds", *ALGORITHMS[0], ROUNDS["pairs"], LIMIT]
    actions += [["load"], [*rounds, "saves1"], ["load", "between"], [*rounds, "saves2"]]
    settings = [f"trainer.zero_stage={stage}", "algorithm.kl_coef=0.5"]
    settings.append(f"trainer.optimizer.grad_clip={clip}")
    job = {"name": "run", "settings": settings, "actions": actions}
    *metrics, _, _ = tiny_world.run_world(job, tmp_path, ranks)[0]["metrics"]
    pairs = zip(metrics[::2], metrics[1::2], strict=True)
    for number, (once, rounds) in enumerate(pairs):
        case = ALGORITHMS[number]
        size = compare(tmp_path, ranks, f"once{number}", f"rounds{number}")
        assert once["grad_norm"] == pytest.approx(size, rel=1e-5), case
        for name, value in once.items():
            if not name.startswith("seconds_"):
                assert rounds[name] == pytest.approx(value, rel=1e-5, abs=1e-7), (case, name)
    # a checkpoint between rounds changes nothing, and holds nothing of them
    for saved in ("saves1", "saves2"):
        compare(tmp_path, ranks, "once0", saved)


def compare(folder, ranks: int, once: str, rounds: str) -> float:
    """The norm of the gradient, which is the same on every rank and in both files; so are the
    weights after its update."""
    for rank in range(ranks):
        whole, parts = (np.load(folder / f"{name}-{rank}.npz") for name in (once, rounds))
        names = [name for name in whole.files if not name.endswith(" after")]
        size = np.sqrt(sum(np.square(whole[name]).sum() for name in names))
        apart = np.sqrt(sum(np.square(whole[name] - parts[name]).sum() for name in names))
        assert size > 1e-3 and apart <= 3e-6 * size, (rounds, apart / size)
        for after in (f"{name} after" for name in names):
            np.testing.assert_allclose(parts[after], whole[after], 0, 1e-5, err_msg=rounds)
    return size


def test_bfloat16_is_scaled_where_it_is_summed(tmp_path):
    """Its gradients differ by rounding; a scale left out would be a factor of four."""
    tiny_world.save_model(tmp_path / "model")
    args = ["dapo", DAPO | {"overlong_filtering": False}, 1, "pairs"]
    steps = [["rounds", *args, r, LIMIT, f"{len(r)}"] for r in (WHOLE, ROUNDS["pairs"])]
    settings = ["trainer.zero_stage=2", *tiny_world.BFLOAT16, "trainer.optimizer.grad_clip=1e6"]
    actions = [["publish", 0], ["save"], steps[0], ["load"], steps[1]]
    job = {"name": "run", "settings": settings, "actions": actions}
    once, rounds = tiny_world.run_world(job, tmp_path, 1)[0]["metrics"]
    for name in ("grad_norm", "loss"):
        assert rounds[name] == pytest.approx(once[name], rel=0.05), name
