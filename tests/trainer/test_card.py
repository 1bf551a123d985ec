"""A trainer rank refuses a GPU that lacks what the launcher has counted on."""

from types import SimpleNamespace

import pytest
import torch

from rose.config import ConfigError
from rose.trainer import compilers
from rose.trainer.trainer import Trainer


def check(monkeypatch, memory_gib: float, compiler: str = "", **chosen) -> None:
    card = SimpleNamespace(name="NVIDIA L40S", total_memory=int(memory_gib * 2**30))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    monkeypatch.setattr(compilers, "no_compiler", lambda on_gpu: compiler)
    trainer = SimpleNamespace(**({"kernels": "liger", "gradient_checkpointing": False} | chosen))
    config = SimpleNamespace(trainer=trainer, cluster=SimpleNamespace(gpu_memory_gib=79))
    Trainer._check_card(SimpleNamespace(config=config, device=torch.device("cpu"), index=3))


def test_a_smaller_card_than_the_choice_was_made_for_is_named(monkeypatch):
    with pytest.raises(ConfigError, match=r"gpu_memory_gib=79, but the NVIDIA L40S of trainer 3"):
        check(monkeypatch, 44.4)
    check(monkeypatch, 78.2)
    check(monkeypatch, 44.4, gradient_checkpointing=True)


def test_ligers_kernels_without_a_compiler_are_refused(monkeypatch):
    with pytest.raises(ConfigError, match="no gcc here; or trainer.kernels=none"):
        check(monkeypatch, 79, compiler="no gcc here")
    check(monkeypatch, 79, compiler="no gcc here", kernels="none")
