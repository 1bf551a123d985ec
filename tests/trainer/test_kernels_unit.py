"""What rose/trainer/kernels.py says and asks for, and the shapes that compiled layers get, without
compilers."""

import sys
from types import ModuleType

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.models.llama import modeling_llama

from rose.trainer import kernels, model
from rose.trainer.prefix_tree import build
from tests.trainer import tiny_world


@pytest.mark.parametrize("width, tokens", [(1, [5, 5]), (1, [5, 7]), (3, [5, 5])])
def test_layers_that_are_compiled_never_get_a_single_token(tmp_path, width, tokens):
    policy = model.load(tiny_world.save_model(tmp_path), torch.float32, False)
    policy.use_stretches()
    rows = np.zeros((2, width), np.int64)
    rows[:, 0] = tokens
    tree = build(rows, np.ones(2, np.int64))
    inputs, mask = torch.from_numpy(rows), torch.zeros(rows.shape)
    mask[:, 0] = 1
    exact = [policy(inputs, inputs + 1, mask, given) for given in (None, tree)]
    policy.compiled, lengths = True, []
    policy.hf.base_model.layers[0].register_forward_pre_hook(
        lambda _, args: lengths.append(args[0].shape[1])
    )
    for given, (logprobs, entropy) in zip((None, tree), exact, strict=True):
        found = policy(inputs, inputs + 1, mask, given)
        torch.testing.assert_close(found[0], logprobs)
        torch.testing.assert_close(found[1], entropy)
    assert min(lengths) > 1


def test_a_model_without_layers_where_they_are_looked_for_is_refused():
    hf = tiny_world.random_model("GPT2", vocab_size=7, n_embd=8, n_layer=1, n_head=2)
    with pytest.raises(kernels.CannotCompile, match="GPT2LMHeadModel.*trainer.compile=false"):
        kernels.compile_layers(model.Policy(hf))


class Biasless(torch.nn.Module):
    """As LigerSwiGLUMLP."""

    def __init__(self, config):
        super().__init__()
        sides = {"gate_proj": (8, 16), "up_proj": (8, 16), "down_proj": (16, 8)}
        for name, (ins, outs) in sides.items():
            setattr(self, name, torch.nn.Linear(ins, outs, bias=False))


@pytest.fixture
def liger(monkeypatch):
    """Liger's way of patching, without its kernels, which need a GPU; what it was asked for."""
    asked: dict[str, bool] = {}

    def apply(hf, **options):
        asked.update(options)
        monkeypatch.setattr(modeling_llama, "LlamaMLP", Biasless)

    for name in ("liger_kernel", "liger_kernel.transformers"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    patches = ModuleType("monkey_patch")
    patches._apply_liger_kernel_to_instance = apply
    sys.modules["liger_kernel.transformers"].monkey_patch = patches
    return asked


def save_llama(folder, **more):
    sizes = {"vocab_size": 7, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 2, "mlp_bias": True}
    tiny_world.random_model("Llama", **sizes, **more).save_pretrained(folder)
    return model.load(folder, torch.float32, False)


def test_a_folder_that_lacks_a_weight_is_refused(tmp_path):
    tiny_world.save_model(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"], weights["model.norm.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="lack model.layers.1.mlp.up_proj.weight and 1 more; copy"):
        model.load(tmp_path, torch.float32, False)


def test_a_reference_that_is_read_after_ligers_kernels_has_all_of_its_weights(tmp_path, liger):
    policy = save_llama(tmp_path)
    kernels.use_liger(policy)
    again = model.load(tmp_path, torch.float32, False)
    names = [name for name, _ in policy.named_weights()]
    assert [name for name, _ in again.named_weights()] == names
    assert any(name.endswith("mlp.down_proj.bias") for name in names)
    assert liger["swiglu"]


def test_ligers_silu_takes_no_other_activations_place(tmp_path, liger):
    kernels.use_liger(save_llama(tmp_path, hidden_act="gelu"))
    assert not liger["swiglu"] and liger["rms_norm"]
