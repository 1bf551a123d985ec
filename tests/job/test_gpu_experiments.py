"""The GPU experiments as they are, but for their sizes: a tiny model of the same architecture from
a hub's cache made by hand, no network, and one step through the whole job."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import hub_cache
import pytest
import torch
from transformers import AutoConfig, Qwen2Config, Qwen2ForCausalLM

from rose import config as configuration
from rose import models
from rose.observe.metrics import read_metrics, rows_of
from tests.conftest import compose_tree

pytestmark = pytest.mark.slow

REPOSITORY = Path(__file__).resolve().parents[2]
DEADLINE_S = 480.0
SIZES = (
    "cluster=local",
    "cluster.gpus=0",
    "model.max_context=512",
    "trainer.steps=1",
    "trainer.batch_size=8",
    "trainer.micro_batch_tokens=1024",
    "trainer.threads=1",
    "rollout.workers=1",
    "rollout.tensor_parallel=1",
    "rollout.group_size=4",
    "rollout.max_sequences=8",
    "rollout.max_batched_tokens=1024",
    "rollout.kv_cache_gib=0.05",
    "rollout.environment_hosts=1",
    "rollout.threads=1",
    "env.max_new_tokens=32",
    "eval.episodes=4",
    "observe.terminal=false",
)


def qwen2(tiny: Path, folder: Path) -> Path:
    """The tiny model's tokenizer with a random Qwen2 decoder: biases in attention, an output matrix
    of its own."""
    shutil.copytree(tiny, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    of = AutoConfig.from_pretrained(tiny)
    torch.manual_seed(0)
    made = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=of.vocab_size,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=2048,
            tie_word_embeddings=False,
            eos_token_id=of.eos_token_id,
            pad_token_id=of.pad_token_id,
        )
    )
    made.to(torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def hub_home(tmp_path_factory):
    """An HF_HOME whose hub has acme/tiny-qwen2 and acme/tiny-qwen3."""
    home = tmp_path_factory.mktemp("hf")
    tiny = models.resolve(configuration.from_dict(compose_tree()).model)
    hub_cache.add(home / "hub", "acme/tiny-qwen3", tiny)
    hub_cache.add(
        home / "hub", "acme/tiny-qwen2", qwen2(tiny, tmp_path_factory.mktemp("made") / "qwen2")
    )
    return home


@pytest.mark.parametrize(
    "experiment, repository, trainers, stage",
    [
        ("qwen3_0_6b", "acme/tiny-qwen3", 1, 2),
        ("qwen7b", "acme/tiny-qwen2", 1, 3),
        ("qwen7b_lora", "acme/tiny-qwen2", 1, 2),
        ("qwen8b_frozenlake", "acme/tiny-qwen3", 1, 3),
        ("qwen32b", "acme/tiny-qwen3", 2, 3),
    ],
)
def test_an_experiment_trains_a_step_with_only_its_sizes_changed(
    hub_home, tmp_path, experiment, repository, trainers, stage
):
    ended = subprocess.run(
        [
            sys.executable,
            str(REPOSITORY / "launch.py"),
            f"+experiment={experiment}",
            *SIZES,
            f"model.path={repository}",
            f"trainer.ranks={trainers}",
            f"output_dir={tmp_path}",
        ],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        env=os.environ | {"HF_HOME": str(hub_home), "HF_HUB_OFFLINE": "1"},
    )
    run = tmp_path / experiment
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert [row["step"] for row in rows_of(read_metrics(run), "step")] == [1]
    stored = configuration.load(run / "config.json")
    assert stored.model.source == "hub" and stored.model.path == repository
    assert (
        Path(stored.model.snapshot).name == hub_cache.COMMIT and stored.trainer.zero_stage == stage
    )
