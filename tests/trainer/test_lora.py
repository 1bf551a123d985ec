"""The real trainer with an adapter equals a plain loop over PEFT's own model, publishes exactly its
adapter, and resumes bit for bit, only beside its own base."""

import json
import shutil

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file

from rose.transfer.edge import read_plan
from rose.transfer.receive import materialise
from rose.transfer.source import Folder
from tests.trainer import tiny_world
from tests.trainer.test_trainer import LAST, STEPS, WARM, Warm

pytestmark = pytest.mark.slow
TARGETS = ["q_proj", "v_proj", "down_proj"]
RANK, ALPHA = 4, 6.0
LORA = f"trainer.lora={{rank: {RANK}, alpha: {ALPHA}, targets: [{', '.join(TARGETS)}]}}"
ACTIONS = [["publish", 0], *(["train", *step] for step in STEPS), ["publish", 3], ["save"]]
ACTIONS += [["train", *LAST, 4], ["publish", 4]]
JOB = {"name": "run", "settings": [LORA, "algorithm.kl_coef=0.5", WARM], "actions": ACTIONS}
RESUMED = {"name": "resumed", "actions": [["load"], ["turn"], ["train", *LAST], ["publish", 4]]}
WORLDS = [(0, 1), (1, 2), (2, 2), (3, 2)]


class PlainLora(Warm):
    """`start`: version 0, B times alpha / rank."""

    def __init__(self, folder, start, kl_coef):
        super().__init__(folder, kl_coef)
        lora = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=TARGETS)
        self.model = get_peft_model(self.model, lora)
        with torch.no_grad():
            for name, parameter in self.named():
                parameter.copy_(start[name] / (ALPHA / RANK if "lora_B" in name else 1.0))
        self.optimizer = self.adam(p for _, p in self.named())

    def named(self):
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad:
                own = name.removeprefix("base_model.model.").replace(".default.", ".")
                yield own, parameter

    def published(self):
        return {n: p.detach() * (1.5 if "lora_B" in n else 1.0) for n, p in self.named()}


def run(folder, stage, ranks, job):
    """With stage 2 the ranks share each row."""
    parts = ranks if stage == 2 else 1
    more = [f"trainer.zero_stage={stage}", f"trainer.sequence_parallel={parts}"]
    job = job | {"settings": [*JOB["settings"], *more]}
    return tiny_world.run_world(job, folder, ranks)


@pytest.fixture(scope="module", params=WORLDS, ids=lambda world: f"zero{world[0]}-ranks{world[1]}")
def world(request, tmp_path_factory):
    stage, ranks = request.param
    folder = tmp_path_factory.mktemp("lora")
    tiny_world.save_model(folder / "model")
    return folder, stage, ranks, run(folder, stage, ranks, JOB)


def test_the_adapter_loss_gradient_and_kl_equal_the_plain_loop_over_peft(world):
    folder, _, _, reports = world
    start, trained = (materialise(folder / "run", version) for version in (0, 3))
    plain = PlainLora(folder / "model", start, 0.5)
    for step, metrics in zip(STEPS, reports[0]["metrics"], strict=False):
        plain.kl = 0.0
        loss, norm = plain.train(*step)
        assert metrics["loss"] == pytest.approx(loss, abs=1e-5)
        assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-4)
        assert metrics["reference_kl"] * metrics["tokens"] == pytest.approx(plain.kl, abs=1e-4)
    expected = plain.published()
    assert trained.keys() == expected.keys() and len(trained) == 2 * 2 * len(TARGETS)
    for name, values in expected.items():
        moved = (trained[name] - start[name]).abs().max()
        assert moved > 1e-4 and (start[name].abs().max() > 0) == ("lora_A" in name)
        np.testing.assert_allclose(trained[name], values, rtol=0, atol=2e-3 * float(moved))
    assert reports[0]["parameters"] == sum(t.numel() for t in expected.values())
    assert reports[0]["models"] == 1, "the reference is the policy without its adapter"


def test_the_plan_has_the_hashes_of_the_models_folder_however_it_is_shared(world):
    folder, _, _, _ = world
    plan, _ = read_plan(Folder(folder / "run"))
    stored = load_file(folder / "model" / "model.safetensors")
    found = {t.name: t.shape for t in plan.base.tensors}
    assert found == {n: tuple(t.shape) for n, t in stored.items()}
    from rose.trainer import adapter
    from rose.trainer.model import load

    policy = load(folder / "model", torch.float32, False)
    policy.requires_grad_(False)
    again = adapter.base_of(
        policy.named_weights(), lambda p: p.detach(), torch.float32, lambda name, shape: ([], [])
    )
    assert again.fingerprint == plan.base.fingerprint


def test_it_resumes_bit_for_bit_from_a_checkpoint_that_has_only_the_adapter(world):
    folder, stage, ranks, reports = world
    states = folder / "checkpoint" / "deepspeed"
    for path in states.glob("*model_states.pt"):
        module = torch.load(path, weights_only=True)["module"]
        assert module and all(".lora_" in name for name in module)
    resumed = run(folder, stage, ranks, RESUMED)
    expected, got = materialise(folder / "run", 4), materialise(folder / "resumed", 4)
    assert all(torch.equal(expected[name], got[name]) for name in expected)
    for key in ("loss", "grad_norm", "reference_kl", "lr"):
        assert resumed[0]["metrics"][0][key] == reports[0]["metrics"][3][key]


@pytest.mark.parametrize("world", [(1, 2)], indirect=True)
def test_a_checkpoint_beside_another_base_is_refused(world, tmp_path):
    folder, stage, ranks, _ = world
    shutil.copytree(folder / "checkpoint", tmp_path / "checkpoint")
    shutil.copytree(folder / "model", tmp_path / "model")
    path = tmp_path / "model" / "model.safetensors"
    stored = load_file(path)
    stored["model.norm.weight"][3] += 0.5
    save_file(stored, path, metadata={"format": "pt"})
    hashes = json.loads((tmp_path / "checkpoint" / "trainer.json").read_text())["base"]
    with pytest.raises(AssertionError, match=f"adapter is for another base model.*{hashes}"):
        run(tmp_path, stage, ranks, RESUMED)


@pytest.mark.parametrize("stage", [2, 3])
def test_bfloat16_follows_float32_within_its_precision(stage, tmp_path):
    tiny_world.save_model(tmp_path / "model")
    more = [f"trainer.zero_stage={stage}", *tiny_world.BFLOAT16]
    more.append("trainer.gradient_checkpointing=true")
    actions = [["publish", 0], ["train", *STEPS[0]], ["publish", 1]]
    job = {"name": "run", "actions": actions, "settings": [LORA, WARM, *more]}
    metrics = tiny_world.run_world(job, tmp_path, 2)[0]["metrics"][0]
    start = {n: t.float() for n, t in materialise(tmp_path / "run", 0).items()}
    _, norm = PlainLora(tmp_path / "model", start, 0.0).train(*STEPS[0])
    assert metrics["grad_norm"] == pytest.approx(norm, rel=0.1)
    found = materialise(tmp_path / "run", 1)
    assert {t.dtype for t in found.values()} == {torch.bfloat16}
