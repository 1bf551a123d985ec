"""Experts as transformers holds and saves them; those without tokens have no gradient."""

import copy

import pytest
import torch
from safetensors.torch import load_file

from rose.trainer import model as models
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


@pytest.mark.parametrize("tokens", [1, 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_equal_the_plain_loop_also_unchosen_ones(tmp_path, tokens, dtype, monkeypatch):
    tiny_mixture().save_pretrained(tmp_path)
    hf = models.load(tmp_path, dtype, gradient_checkpointing=False).hf
    ours = hf.base_model.layers[0].mlp.experts
    plain = copy.deepcopy(ours)
    plain.config._experts_implementation = "eager"
    counts = []
    product = torch.nn.functional.grouped_mm

    def counted(rows, weights, offs):
        counts.append(offs.diff(prepend=offs.new_zeros(1)))
        return product(rows, weights, offs=offs)

    monkeypatch.setattr(torch.nn.functional, "grouped_mm", counted)
    numbers = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, 32, generator=numbers).to(dtype)
    chosen = torch.tensor([[1, 5], [5, 6]]).repeat(4, 1)[:tokens]
    weights = torch.rand(tokens, 2, generator=numbers).to(dtype)
    found = []
    for experts in (ours, plain):
        inputs = [x.clone().requires_grad_() for x in (hidden, weights)]
        values = experts(inputs[0], chosen, inputs[1])
        (values.float() ** 2).sum().backward()
        found.append([values, *(x.grad for x in inputs), *(p.grad for p in experts.parameters())])
    close = {"rtol": 1e-4, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 0.05, "atol": 1e-3}
    torch.testing.assert_close(*found, **close)
    assert len(counts) == 2 and all((count >= 1).all() for count in counts)
    for gradient in found[0][3:]:
        assert gradient[1].any() and not gradient[[0, 2, 3, 4, 7]].any()
