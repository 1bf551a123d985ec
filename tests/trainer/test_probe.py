"""A model is refused as it is loaded where the trainer would train another policy than the model's
own `forward` computes; small random models of transformers' families."""

import pytest
import torch

from rose.trainer import model, probe
from rose.trainer.prefix_tree import obstacle
from tests.trainer import tiny_world

SIZES = tiny_world.SIZES | {"hidden_size": 64, "intermediate_size": 96}
SIZES |= {"max_position_embeddings": 512, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
del SIZES["head_dim"]
CONTEXT = 512
# Attention whose values are smaller than its keys.
LATENT = {"num_key_value_heads": 4, "moe_intermediate_size": 32, "n_routed_experts": 4}
LATENT |= {"num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
LATENT |= {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16}
LATENT |= {"v_head_dim": 12}
ROPE = {"rope_theta": 10000.0, "factor": 4.0}
FACTORS = {"short_factor": [1.0] * 8, "long_factor": [1.0 + i for i in range(8)]}
FACTORS |= {"original_max_position_embeddings": 128}
LONGROPE = {"original_max_position_embeddings": 128}
LONGROPE |= {"rope_parameters": {"rope_type": "longrope"} | ROPE | FACTORS}
DYNAMIC = {"max_position_embeddings": 128, "rope_parameters": {"rope_type": "dynamic"} | ROPE}
MAMBA = {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 16}


class Engine:
    """A policy on this CPU, behind what the probe uses of a `DeepSpeedEngine`."""

    def __init__(self, folder, dtype):
        self.policy, self.device = model.load(folder, dtype, False).train(), torch.device("cpu")
        self.trees = not obstacle(self.policy.hf.config)
        if self.trees:
            self.policy.use_stretches()

    def __call__(self, *args):
        return self.policy(*args)


def check(folder, family, more, dtype=torch.float32, max_context=CONTEXT):
    tiny_world.random_model(family, **SIZES | more).save_pretrained(folder)
    engine = Engine(folder, dtype)
    state, attention = torch.get_rng_state(), engine.policy.hf.config._attn_implementation
    try:
        probe.check(engine, folder, max_context, engine.trees)
    finally:
        assert torch.equal(state, torch.get_rng_state())
        assert all(module.training for module in engine.policy.modules())
        assert engine.policy.hf.config._attn_implementation == attention
        assert "forward" not in vars(engine.policy)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("family", "more"),
    [
        ("Llama", {}),
        ("Qwen3", {"head_dim": 16}),
        ("Mistral", {"sliding_window": 8}),
        ("Mixtral", {}),
        ("DeepseekV3", LATENT),
        ("OPT", {"ffn_dim": 96, "word_embed_proj_dim": 64, "layerdrop": 0.3}),
    ],
)
def test_models_that_are_trained_as_they_are_sampled_from_are_taken(tmp_path, family, more, dtype):
    check(tmp_path, family, more, dtype)


UNLIKE, BESIDE = "rows of unlike length", "beside one of model.max_context=512 tokens"
DRAWS = "draws random numbers in training"
MIXED = {"num_local_experts": 4}
GRIFFIN = {"lru_width": 64, "block_types": ["recurrent", "attention"], "logits_soft_cap": 3.0}
CAPPED = {"head_dim": 16, "final_logit_softcapping": None, "attn_logit_softcapping": 2.0}


@pytest.mark.parametrize(
    ("family", "more", "words"),
    [
        ("FalconH1", MAMBA | {"lm_head_multiplier": 0.5}, UNLIKE),
        ("Phi3", LONGROPE, f"{BESIDE}.*model.max_context"),
        ("Llama", DYNAMIC, f"{BESIDE}.*model.max_context"),
        ("Phimoe", MIXED, UNLIKE),
        ("Mixtral", {"router_jitter_noise": 0.3}, UNLIKE),
        ("RecurrentGemma", GRIFFIN, UNLIKE),
        ("Gemma2", CAPPED, "attn_logit_softcapping=2.0"),
        ("ModernBertDecoder", {}, UNLIKE),
        ("Bert", {}, UNLIKE),
        ("Llama4Text", {"head_dim": 16, "num_local_experts": 2}, "fails with AttributeError"),
        # less than bfloat16 rounds
        ("Phimoe", MIXED | {"router_jitter_noise": 0.01}, DRAWS),
        ("Mixtral", {"router_jitter_noise": 0.02}, DRAWS),
    ],
)
def test_a_model_that_would_be_trained_as_another_policy_is_refused(tmp_path, family, more, words):
    dtype = torch.bfloat16 if words is DRAWS else torch.float32
    with pytest.raises(ValueError, match=f"model {tmp_path}: .*{words}"):
        check(tmp_path, family, more, dtype)


def test_rotary_positions_that_change_with_length_are_taken_within_the_context(tmp_path):
    check(tmp_path, "Phi3", LONGROPE, max_context=128)
    with pytest.raises(ValueError, match="nats a token"):
        check(tmp_path, "Phi3", LONGROPE, max_context=129)


def test_trees_that_the_device_cannot_compute_are_refused_with_the_key(tmp_path, monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("no kernel\nfor this")

    monkeypatch.setattr(model.tree_attention, "attended", fail)
    words = "a prefix tree: .*RuntimeError: no kernel; set trainer.share_prefixes=false"
    with pytest.raises(ValueError, match=words):
        check(tmp_path, "Llama", {})


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
def test_every_rank_refuses_it_also_where_its_weights_are_split(tmp_path, stage):
    tiny_world.random_model("Phi3", **SIZES | LONGROPE).save_pretrained(tmp_path / "model")
    job = {"name": "run", "settings": [f"trainer.zero_stage={stage}"], "actions": []}
    words = r"(?s)rank 0: .*beside one of model.max_context.*rank 1: .*model.max_context"
    with pytest.raises(AssertionError, match=words):
        tiny_world.run_world(job, tmp_path, 2)
