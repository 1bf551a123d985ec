"""The real trainer with a mixture of experts equals a plain loop, with the engines' experts too,
and publishes and saves each expert as the model's folder has it."""

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from rose.export.weights import CheckpointWeights
from rose.trainer.router_replay import RouterReplay
from rose.transfer.receive import materialise
from tests.trainer import tiny_world
from tests.trainer.test_experts import in_parts, tiny_mixture
from tests.trainer.test_trainer import STEPS, Plain

pytestmark = pytest.mark.slow

STEP = STEPS[0]


class Replayed(Plain):
    """Routed as `tiny_world.with_experts` says."""

    def __init__(self, folder):
        super().__init__(folder)
        self.replay = RouterReplay(self.model)
        rows = tiny_world.with_experts(tiny_world.make_batch(STEP[0])[0])
        self.experts = {t.id: t.experts for t in rows.values()}

    def logprobs(self, t, model=None):
        tokens = len(t.mask) - 1
        chosen = self.replay.unpack(self.experts[t.id], tokens, t.id)
        self.replay.begin(torch.tensor(chosen[None]), torch.ones(1, tokens))
        return super().logprobs(t, model)


@pytest.mark.parametrize(
    ("stage", "loop", "more"),
    [
        (2, Plain, []),
        (3, Replayed, ["trainer.router_replay=true", "trainer.gradient_checkpointing=true"]),
    ],
)
def test_a_mixture_trains_publishes_and_saves_as_the_plain_loop(tmp_path, stage, loop, more):
    tiny_mixture().save_pretrained(tmp_path / "model")
    actions = [["publish", 0], ["train", *STEP], ["publish", 1], ["save"]]
    job = {"name": "run", "actions": actions, "experts": loop is Replayed}
    job["settings"] = [f"trainer.zero_stage={stage}", "deterministic=false", *more]
    reports = tiny_world.run_world(job, tmp_path, 2)
    [metrics] = reports[0]["metrics"]
    plain = loop(tmp_path / "model")
    loss, norm = plain.train(*STEP)
    assert metrics["loss"] == pytest.approx(loss, abs=1e-5)
    assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-4)
    assert ("routing_differs" in metrics) == (loop is Replayed)
    if loop is Replayed:
        assert 0.5 < metrics["routing_differs"] < 1  # two of eight, at random
    stored = load_file(tmp_path / "model/model.safetensors")
    start = materialise(tmp_path / "run", 0)
    assert stored.keys() == start.keys()
    assert all(torch.equal(stored[name], start[name]) for name in stored)
    experts = sum(tensor.nbytes for name, tensor in stored.items() if ".experts." in name)
    assert [r["merged"] for r in reports] == ([experts, 0] if stage == 3 else [0, 0])
    trained, expected = materialise(tmp_path / "run", 1), in_parts(plain.model)
    for name, tensor in expected.items():
        moved = (trained[name] - start[name]).abs().max().item()
        np.testing.assert_allclose(
            trained[name], tensor, rtol=0, atol=max(1e-6, 2e-3 * moved), err_msg=name
        )
    (tmp_path / "checkpoint").rename(tmp_path / "step-000001")
    saved = CheckpointWeights(tmp_path / "step-000001")
    values, digests = saved.read(saved.tensors)
    assert values.keys() == digests.keys() == trained.keys()
    assert all(torch.equal(values[name], trained[name]) for name in trained)
