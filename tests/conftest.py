"""What every test shares: the variables of a CPU run, set before anything reads them, and composed configurations."""

import os
from pathlib import Path

CPU_VARIABLES = {"OMP_WAIT_POLICY": "passive", "TORCH_COMPILE_DISABLE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
                 "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
for name, value in CPU_VARIABLES.items():
    os.environ.setdefault(name, value)

import pytest  # noqa: E402
from hydra import compose, initialize_config_dir  # noqa: E402
from omegaconf import OmegaConf  # noqa: E402

from rose import config as configuration  # noqa: E402

REPOSITORY = Path(__file__).resolve().parents[1]


def compose_tree(*overrides: str) -> dict:
    """conf/ with these overrides, as plain containers."""
    with initialize_config_dir(str(REPOSITORY / "conf"), version_base="1.3"):
        return OmegaConf.to_container(compose("config", list(overrides)), resolve=True)


@pytest.fixture
def tree():
    """tree("trainer.steps=3", ...) -> the composed tree, unchecked."""
    return compose_tree


@pytest.fixture
def make_config():
    """make_config("trainer.steps=3", ...) -> the checked `Config`."""
    return lambda *overrides: configuration.from_dict(compose_tree(*overrides))
