"""What fused kernels need is looked for before anything starts."""

import importlib.util
from types import SimpleNamespace

import pytest
import torch

from rose import checks
from rose.config import ConfigError
from rose.launch import model
from rose.trainer import compilers
from rose.trainer.trainer import Trainer
from tests.conftest import compose_tree
from tests.made import model_folder

LIGER = ("trainer=zero3_gpu", "rollout=gpu", "cluster=gpus", "cluster.gpus=16")


def test_without_a_compiler_nothing_is_to_be_compiled(make_config, monkeypatch, tmp_path):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    words = r"trainer.compile=True: no g\+\+ here.* apt-get install g\+\+.*trainer.compile=false"
    with pytest.raises(ConfigError, match=words):
        checks.check(compose_tree("trainer.compile=true"))
    compilers.check(make_config())
    (tmp_path / "clang").touch(0o755)
    assert compilers.why_not_compile(on_gpu=True) == "" != compilers.why_not_compile(on_gpu=False)
    monkeypatch.setenv("CXX", "clang")
    compilers.check(make_config("trainer.compile=true"))
    monkeypatch.setattr(compilers.sysconfig, "get_path", lambda name: str(tmp_path))
    for on_gpu in (True, False):
        assert f"no Python.h in {tmp_path}" in compilers.why_not_compile(on_gpu)


def test_liger_has_to_be_installed(make_config, monkeypatch):
    there, find = {"triton"}, importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: name if name in there else find(f"no_{name}")
    )
    c = make_config(*LIGER, "trainer.kernels=liger")
    with pytest.raises(ConfigError, match=r"liger-kernel isn't installed.*'rose-rl\[liger\]'"):
        compilers.check(c)
    there.add("liger_kernel")
    compilers.check(c)


def test_a_model_without_fused_operations_is_refused_by_its_config(make_config, tmp_path):
    c = make_config(*LIGER, "trainer.kernels=liger", f"model.path={tmp_path}")
    sizes = {"num_attention_heads": 8, "max_position_embeddings": 2**20}
    for kind in ("qwen3", "gpt2"):
        model_folder(tmp_path, model_type=kind, architectures=["AnyForCausalLM"], **sizes)
        if kind == "qwen3":
            assert model.shape(c).heads == 8
        else:
            with pytest.raises(ConfigError, match="no kernels for models of the type gpt2.*none"):
                model.shape(c)
    c = make_config("trainer.compile=true", "model.max_context=64", f"model.path={tmp_path}")
    with pytest.raises(ConfigError, match="trainer.compile=True: .* the type gpt2 .*compile=false"):
        model.shape(c)


NONE = "no gcc here"


def rank(monkeypatch, lacking: str, kernels: str = "none", device: str = "cuda") -> SimpleNamespace:
    monkeypatch.setattr(compilers, "no_compiler", lambda on_gpu: lacking)
    config = SimpleNamespace(trainer=SimpleNamespace(kernels=kernels), compares_updates=True)
    return SimpleNamespace(config=config, device=torch.device(device))


def test_without_a_compiler_ligers_kernels_are_refused_and_versions_published_by_a_copy(
    monkeypatch,
):
    with pytest.raises(ConfigError, match="no gcc here; or trainer.kernels=none"):
        Trainer._check_compiler(rank(monkeypatch, NONE, "liger"))
    Trainer._check_compiler(rank(monkeypatch, NONE))
    Trainer._check_compiler(rank(monkeypatch, "", "liger"))
    compares = Trainer._compares.fget
    assert not compares(rank(monkeypatch, NONE))
    assert compares(rank(monkeypatch, ""))
    assert compares(rank(monkeypatch, NONE, device="cpu"))
