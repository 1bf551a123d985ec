"""Experts as transformers holds and saves them, and what of them travels."""

import pytest
import torch
from safetensors.torch import load_file

from rose.trainer.experts import parameter_of, parts
from tests.trainer.tiny_world import SIZES, random_model
from tests.transfer.worlds import World

EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}


def tiny_mixture():
    return random_model("Qwen3Moe", **SIZES, **EXPERTS, norm_topk_prob=True)


@pytest.fixture(scope="module")
def model():
    return tiny_mixture()


def in_parts(model) -> dict[str, torch.Tensor]:
    return {
        part.name: whole.detach()
        .reshape(-1)[part.start :]
        .as_strided(part.shape, (part.shape[-1], 1) if len(part.shape) == 2 else (1,))
        for name, whole in model.named_parameters()
        for part in parts(name, tuple(whole.shape))
    }


def test_parts_are_the_tensors_that_transformers_writes(model, tmp_path):
    model.save_pretrained(tmp_path)
    stored, found = load_file(tmp_path / "model.safetensors"), in_parts(model)
    assert stored.keys() == found.keys()
    assert all(torch.equal(stored[name], found[name]) for name in stored)


def test_a_part_is_found_in_its_parameter(model):
    for name, whole in model.named_parameters():
        for part in parts(name, tuple(whole.shape)):
            assert parameter_of(part.name, part.shape) == (name, part.start)


def test_only_the_expert_that_changed_travels(model, tmp_path):
    """Each other block costs the few bytes that say that it is the same."""
    weights = {name: tensor.clone() for name, tensor in in_parts(model).items()}
    world = World(tmp_path / "store", weights, {}, largest=10**6)
    world.publish(0)
    nothing = world.publish(1).nbytes
    changed = {name: t.clone() for name, t in weights.items()}
    own = [name for name in changed if ".layers.1.mlp.experts.5." in name]
    assert len(own) == 3
    for name in own:
        changed[name].mul_(1.5)
    world.weights = changed
    one = world.publish(2).nbytes - nothing
    expert = sum(weights[name].numel() * 4 for name in own)
    assert 0 < one < 1.1 * expert < sum(t.numel() * 4 for t in weights.values()) / 10
    print(f"one of 16 experts changed: {one} B beside {nothing} B for none; it has {expert} B")
