"""Replicas outside of the trainer's world compute parts of steps: the gradient is that of a step
without them, with any number of them and every ZeRO stage, on real processes."""

import numpy as np
import pytest
import torch

from rose import protocol as p
from rose.observe.recorder import NullRecorder
from rose.parts.replicas import replica
from tests.trainer import tiny_world

pytestmark = pytest.mark.slow

LIMIT = 64  # several micro-batches for each
# (seed: of even ones the micro-batches are prefix trees, replicas, those of them that are lost)
STEPS = [(1, 1, 0), (2, 2, 1), (3, 0, 0), (4, 2, 0)]


def actions_of(steps: list) -> list:
    """Step after step on the weights of the one before, which is also made without replicas, from
    the same weights."""
    actions: list = [["publish", 0]]
    for version, (seed, replicas, lost) in enumerate(steps):
        actions += [["save"], ["shared", seed, LIMIT, 0, 0, version, f"alone{version}"], ["load"]]
        actions.append(["shared", seed, LIMIT, replicas, lost, version, f"shared{version}"])
        actions.append(["publish", version + 1])
    return actions


def run(folder, steps: list, stage: int, ranks: int, *settings: str) -> list[tuple[dict, dict]]:
    """The metrics of each step: (without replicas, with them)."""
    job = {
        "name": "run",
        "replicas": 2,
        "settings": [f"trainer.zero_stage={stage}", "deterministic=false", *settings],
        "actions": actions_of(steps),
    }
    tiny_world.save_model(folder / "model")
    metrics = tiny_world.run_world(job, folder, ranks)[0]["metrics"]
    return list(zip(metrics[::2], metrics[1::2], strict=True))


def kept(folder, step: int, rank: int) -> tuple[dict, dict]:
    """Of the step without replicas and of the one with them: parameter -> its gradient, and
    "<parameter> after" -> its weights after the update."""
    files = (np.load(folder / f"{name}{step}-{rank}.npz") for name in ("alone", "shared"))
    alone, shared = ({name: found[name] for name in found.files} for found in files)
    return alone, shared


def apart(folder, step: int, rank: int) -> float:
    """How far the gradients of the two are apart, of their norm."""
    alone, shared = kept(folder, step, rank)
    names = [name for name in alone if not name.endswith(" after")]
    size = np.sqrt(sum(np.square(alone[name]).sum() for name in names))
    assert size > 1e-3
    return np.sqrt(sum(np.square(alone[n] - shared[n]).sum() for n in names)) / size


@pytest.mark.parametrize(("stage", "ranks"), [(0, 1), (0, 2), (1, 2), (2, 2), (3, 2)])
def test_replicas_come_and_go_and_the_gradient_is_that_of_a_step_without(stage, ranks, tmp_path):
    metrics = run(tmp_path, STEPS, stage, ranks)
    for step, (alone, shared) in enumerate(metrics):
        for rank in range(ranks):
            assert apart(tmp_path, step, rank) < 3e-6, (step, rank)
        for name, value in alone.items():
            if not name.startswith("seconds_"):
                assert shared[name] == pytest.approx(value, rel=1e-5, abs=1e-6), (step, name)


def test_of_stale_tokens_the_gradient_is_that_of_a_step_without_replicas(tmp_path):
    """As an asynchronous batch has them, with the objective that corrects for it."""
    settings = ["algorithm=decoupled_ppo", "algorithm.args.weight_cap=1e3"]
    settings.append("rollout.temperature=1.5")
    for step, (alone, shared) in enumerate(run(tmp_path, STEPS, 2, 1, *settings)):
        assert apart(tmp_path, step, 0) < 1e-6, step
        assert alone["mismatch_max_ratio"] > 2 and alone["weight_masked"] == 0
        for name, value in alone.items():
            if not name.startswith("seconds_"):
                assert shared[name] == pytest.approx(value, rel=1e-5, abs=1e-6), (step, name)


def test_in_bfloat16_a_replica_has_the_trainers_weights_and_adds_up_in_float32(tmp_path):
    settings = ["trainer.dtype=bfloat16", "model.dtype=bfloat16"]
    metrics = run(tmp_path, [(1, 1, 0), (3, 1, 0)], 2, 2, *settings)
    for step, (alone, shared) in enumerate(metrics):
        # a micro-batch of other rows is rounded otherwise, by a percent
        assert apart(tmp_path, step, 0) < 0.03, step
        assert shared["entropy"] == pytest.approx(alone["entropy"], rel=1e-4)
        assert shared["mismatch_abs"] == pytest.approx(alone["mismatch_abs"], rel=1e-3)


def test_in_bfloat16_under_zero_3_every_parameter_gets_its_gradient_and_is_updated_alike(tmp_path):
    settings = ["trainer.dtype=bfloat16", "model.dtype=bfloat16"]
    lr = 0.01
    run(tmp_path, [(1, 2, 0), (2, 1, 0)], 3, 2, *settings)
    for step in range(2):
        for rank in range(2):
            alone, shared = kept(tmp_path, step, rank)
            parameters = [name for name in alone if not name.endswith(" after")]
            assert len(parameters) > 10
            for name in parameters:
                size = np.linalg.norm(alone[name])
                far = np.linalg.norm(alone[name] - shared[name])
                # a micro-batch of other rows is rounded otherwise, by a few percent of a parameter
                assert far <= 0.1 * size, (step, rank, name, far / size)
                after, other = alone[f"{name} after"], shared[f"{name} after"]
                # of steps of about a third of the learning rate; measured: 0.005 and 0.03 of it
                assert np.linalg.norm(after - other) <= 0.03 * lr * np.sqrt(after.size), (
                    step,
                    name,
                )
                np.testing.assert_allclose(after, other, rtol=0, atol=0.15 * lr)


def test_where_a_replica_cannot_have_trees_an_order_with_some_says_why(make_config, tmp_path):
    made = make_config("trainer.elastic_replicas=1", "trainer.micro_batch_tokens=16384")
    found = replica.Replica(made, tiny_world.save_model(tmp_path / "model"), NullRecorder())
    found.engine.try_flex()  # on a CPU there is none
    order = p.ComputeGradient(1, 0, str(tmp_path), str(tmp_path / "sum"))
    step = p.TrainStep(1, p.BatchSummary([], [], [], []), [[[]]], True, 0)
    why = "micro_batch_tokens=16384 beside this engine.* flex attention trains on GPUs only"
    with pytest.raises(RuntimeError, match=why):
        found._compute(order, step, {})


class Elsewhere(replica.ReplicaEngine):
    """Its device is another part of the host's memory."""

    def _there(self, here):
        return here.clone()


def test_a_replica_is_on_its_device_only_at_work(make_config, tmp_path, monkeypatch):
    folder = tiny_world.save_model(tmp_path / "model")
    engine = Elsewhere(make_config(), folder, torch.device("cpu"))
    parts = [*engine.policy.parameters(), *engine.policy.buffers()]
    assert len(list(engine.policy.buffers())) > 0
    before = [part.data_ptr() for part in parts]
    engine.take_device()
    assert not {part.data_ptr() for part in parts} & set(before)
    given = []
    for module, name in ((torch._C, "_cuda_clearCublasWorkspaces"), (torch.cuda, "empty_cache")):
        monkeypatch.setattr(module, name, lambda name=name: given.append(name), raising=False)
    engine.device = torch.device("cuda")
    engine.give_device_back()
    assert given == ["_cuda_clearCublasWorkspaces", "empty_cache"]
    assert [part.data_ptr() for part in parts] == before
