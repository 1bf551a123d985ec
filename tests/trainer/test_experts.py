"""Experts as transformers holds and saves them."""

import pytest
import torch
from safetensors.torch import load_file

from rose.trainer.experts import parameter_of, parts
from tests.trainer.tiny_world import SIZES, random_model

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
