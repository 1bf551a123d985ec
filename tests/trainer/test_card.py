"""A trainer rank on a GPU whose host has no C compiler, which Triton needs."""

from types import SimpleNamespace

import pytest
import torch

from rose.config import ConfigError
from rose.trainer import compilers
from rose.trainer.trainer import Trainer

NONE = "no gcc here"


def rank(monkeypatch, lacking: str, kernels: str = "none", device: str = "cuda") -> SimpleNamespace:
    monkeypatch.setattr(compilers, "no_compiler", lambda on_gpu: lacking)
    config = SimpleNamespace(trainer=SimpleNamespace(kernels=kernels), compares_updates=True)
    return SimpleNamespace(config=config, device=torch.device(device))


def test_ligers_kernels_without_a_compiler_are_refused(monkeypatch):
    with pytest.raises(ConfigError, match="no gcc here; or trainer.kernels=none"):
        Trainer._check_compiler(rank(monkeypatch, NONE, "liger"))
    Trainer._check_compiler(rank(monkeypatch, NONE))
    Trainer._check_compiler(rank(monkeypatch, "", "liger"))


def test_without_a_compiler_versions_are_published_by_a_copy(monkeypatch):
    compares = Trainer._compares.fget
    assert not compares(rank(monkeypatch, NONE))
    assert compares(rank(monkeypatch, ""))
    assert compares(rank(monkeypatch, NONE, device="cpu"))
