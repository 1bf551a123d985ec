"""Experts without tokens have no gradient, and ranks that need no merged experts have none."""

import copy

import pytest
import torch
from safetensors.torch import load_file
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.integrations import deepspeed as hf_deepspeed

from rose.trainer import mixture, model
from tests.trainer.test_experts import tiny_mixture


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("mixture")
    tiny_mixture().save_pretrained(path)
    return path


@pytest.mark.parametrize("tokens", [1, 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_equal_the_plain_loop_also_unchosen_ones(folder, tokens, dtype, monkeypatch):
    hf = model.load(folder, dtype, gradient_checkpointing=False).hf
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


def test_other_ranks_have_the_shapes_of_merged_experts_and_the_values_of_all_else(folder):
    """As transformers calls it under ZeRO-3; the fast path of models without experts, too."""
    hf, stored = tiny_mixture(), load_file(folder / "model.safetensors")
    convert = hf_deepspeed._apply_weight_conversions_to_state_dict
    for how in (get_model_conversion_mapping(hf), []):
        whole = convert(hf, dict(stored), copy.deepcopy(how))
        shapes = mixture._shapes(convert, hf, dict(stored), copy.deepcopy(how))
        assert list(shapes) == list(whole)
        for name, tensor in whole.items():
            assert (shapes[name].shape, shapes[name].dtype) == (tensor.shape, tensor.dtype)
            assert shapes[name].is_meta == (".experts." in name)
            assert shapes[name].is_meta or torch.equal(shapes[name], tensor)
        assert any(tensor.is_meta for tensor in shapes.values()) == bool(how)


@pytest.mark.parametrize("rank", [0, 1])
def test_transformers_merges_as_before_once_a_model_is_read(monkeypatch, rank):
    before = hf_deepspeed._apply_weight_conversions_to_state_dict
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: rank)
    with pytest.raises(OSError), mixture.merged_by_first_rank():
        changed = hf_deepspeed._apply_weight_conversions_to_state_dict is not before
        raise OSError
    assert changed == bool(rank)
    assert hf_deepspeed._apply_weight_conversions_to_state_dict is before
