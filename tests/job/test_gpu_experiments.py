"""The GPU experiments as they are, but for their sizes: a tiny model of the same architecture from
a hub's cache made by hand, no network, and one step through the whole job."""

import os
import shutil
import sys
from pathlib import Path

import hub_cache
import pytest
import torch
import transformers
from transformers import AutoConfig

from rose import config as configuration
from rose import models
from rose.observe.metrics import read_metrics, rows_of
from tests.conftest import compose_tree
from tests.processes import ran

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]

REPOSITORY = Path(__file__).resolve().parents[2]
DEADLINE_S = 900.0
SIZES = (
    "cluster=local cluster.gpus=0 model.max_context=512 trainer.steps=1 trainer.batch_size=8 "
    "trainer.micro_batch_tokens=1024 trainer.threads=1 rollout.workers=1 "
    "rollout.tensor_parallel=1 rollout.group_size=4 rollout.max_sequences=8 "
    "rollout.max_batched_tokens=1024 rollout.kv_cache_gib=0.05 rollout.environment_hosts=1 "
    "rollout.threads=1 env.max_new_tokens=32 eval.episodes=4 observe.terminal=false"
).split()


MIXTURE = dict(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32, norm_topk_prob=True)


def random_model(tiny: Path, folder: Path, kind: str, **more) -> Path:
    """The tiny model's tokenizer with a random decoder that has an output matrix of its own: of
    Qwen2 (biases in attention) or Qwen3Moe."""
    shutil.copytree(tiny, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    of = AutoConfig.from_pretrained(tiny)
    torch.manual_seed(0)
    shape = getattr(transformers, f"{kind}Config")(
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
        **more,
    )
    made = getattr(transformers, f"{kind}ForCausalLM")(shape)
    made.to(torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def hub_home(tmp_path_factory):
    """An HF_HOME whose hub has acme/tiny-qwen2 and acme/tiny-moe."""
    home = tmp_path_factory.mktemp("hf")
    tiny = models.resolve(configuration.from_dict(compose_tree()).model)
    made = tmp_path_factory.mktemp("made")
    for name, kind, more in (("tiny-qwen2", "Qwen2", {}), ("tiny-moe", "Qwen3Moe", MIXTURE)):
        folder = random_model(tiny, made / name, kind, **more)
        hub_cache.add(home / "hub", f"acme/{name}", folder)
    return home


@pytest.mark.parametrize(
    "experiment, repository, trainers, stage",
    [
        # qwen3_0_6b is what gpu_check.py's `colocated` starts, also on a CPU: test_gpu_check.py
        ("qwen7b", "acme/tiny-qwen2", 1, 3),
        ("qwen7b_64k", "acme/tiny-qwen2", 2, 3),
        ("qwen7b_lora", "acme/tiny-qwen2", 1, 2),
        ("qwen3_30b_a3b", "acme/tiny-moe", 2, 3),
    ],
)
def test_an_experiment_trains_a_step(hub_home, tmp_path, experiment, repository, trainers, stage):
    parts = trainers if experiment == "qwen7b_64k" else 1
    command = [sys.executable, str(REPOSITORY / "launch.py"), f"+experiment={experiment}", *SIZES]
    command += [f"model.path={repository}", f"trainer.ranks={trainers}", f"output_dir={tmp_path}"]
    command += [f"trainer.sequence_parallel={parts}"]
    hub = {"HF_HOME": str(hub_home), "HF_HUB_OFFLINE": "1"}
    ended = ran(command, timeout=DEADLINE_S, env=os.environ | hub)
    run = tmp_path / experiment
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert [row["step"] for row in rows_of(read_metrics(run), "step")] == [1]
    stored = configuration.load(run / "config.json")
    assert stored.model.source == "hub" and stored.model.path == repository
    assert Path(stored.model.snapshot).name == hub_cache.COMMIT
    assert stored.trainer.zero_stage == stage
