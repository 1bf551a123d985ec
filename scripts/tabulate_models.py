"""Find the families of models that the trainer accepts. A small random model of each family that
vLLM serves goes through rose/trainer/probe.py on one CPU core, in float32.

    python scripts/tabulate_models.py       a minute or two; writes docs/models.md

VARIANTS has further configurations of some families. Left out: families that SIZES does not make
small, and models that no config.json describes.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.csv_tables import REPOSITORY, markdown, put

PAGE = REPOSITORY / "docs" / "models.md"
CONTEXT = 512  # tokens of model.max_context
MOST_WEIGHTS = 20_000_000  # limit above which a model has not become small

# Those of these values that a family's configuration has are set.
SIZES: dict[str, Any] = {
    name: value
    for names, value in (
        ("vocab_size", 97),
        ("hidden_size n_embd d_model word_embed_proj_dim lru_width mamba_d_ssm", 64),
        ("intermediate_size ffn_dim intermediate_size_mlp n_inner", 96),
        ("num_hidden_layers n_layer n_layers num_layers num_key_value_heads", 2),
        ("num_attention_heads n_head n_heads num_heads", 4),
        ("max_position_embeddings n_positions max_seq_len", CONTEXT),
        ("num_experts num_local_experts n_routed_experts", 4),
        ("num_experts_per_tok num_experts_per_token moe_topk moe_k eos_token_id", 2),
        ("moe_intermediate_size shared_expert_intermediate_size", 32),
        ("n_group topk_group first_k_dense_replace mamba_n_groups bos_token_id", 1),
        ("q_lora_rank kv_lora_rank qk_nope_head_dim head_dim mamba_d_head mamba_d_state", 16),
        ("linear_key_head_dim linear_value_head_dim mamba_head_dim ssm_state_size", 16),
        ("mamba_n_heads linear_num_key_heads linear_num_value_heads", 4),
        ("qk_rope_head_dim rotary_dim", 8),
        ("v_head_dim", 12),
        ("initializer_range", 0.2),
        ("pad_token_id", 0),
    )
    for name in names.split()
}
# In latent attention, `head_dim` is the rotated part, and each head has keys of its own.
LATENT = {"head_dim": 8, "num_key_value_heads": 4}
EARLY = 128  # tokens of the context before scaling
ROTARY = {"rope_theta": 10000.0, "factor": 4.0}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0] * 8,
    "long_factor": [1.0 + i for i in range(8)],
    "original_max_position_embeddings": EARLY,
}
YARN = {"rope_type": "yarn", "original_max_position_embeddings": EARLY}
VARIANTS: dict[str, dict[str, Any]] = {
    "phi3": {"original_max_position_embeddings": EARLY, "rope_parameters": ROTARY | LONGROPE},
    "llama": {
        "max_position_embeddings": EARLY,
        "rope_parameters": ROTARY | {"rope_type": "dynamic"},
    },
    "qwen3": {"rope_parameters": ROTARY | YARN},
    "qwen2": {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0},
    "mistral": {"sliding_window": None},
    "falcon_h1": {"lm_head_multiplier": 0.5},
    "mixtral": {"router_jitter_noise": 0.3},
    "granite": {"logits_scaling": 8.0},
    "gemma2": {"final_logit_softcapping": None, "attn_logit_softcapping": 2.0},
    "opt": {"layerdrop": 0.3},
}


class Row(NamedTuple):
    family: str
    variant: str
    trained: str
    trees: str


def families() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (model_type, values besides the defaults) of the families of transformers and vLLM."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    from vllm.model_executor.models.registry import _TEXT_GENERATION_MODELS

    for family, kind in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()):
        if kind in _TEXT_GENERATION_MODELS:
            yield family, {}
            if family in VARIANTS:
                yield family, VARIANTS[family]


def save(family: str, more: dict[str, Any], folder: str) -> None:
    """Save a small random model. Raises errors of its code, `ValueError` if it is large."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    known = AutoConfig.for_model(family).to_dict()
    sizes = SIZES | (LATENT if "kv_lora_rank" in known else {})
    config = AutoConfig.for_model(family, **{k: v for k, v in sizes.items() if k in known} | more)
    with torch.device("meta"):
        weights = AutoModelForCausalLM.from_config(config).num_parameters()
    if weights > MOST_WEIGHTS:
        raise ValueError(f"{weights} weights")
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


class Engine:
    """A policy on this CPU in place of a `DeepSpeedEngine`, with prefix trees if possible."""

    def __init__(self, folder: str) -> None:
        import torch

        from rose.trainer.model import load
        from rose.trainer.prefix_tree import obstacle

        self.policy, self.device = load(folder, torch.float32, False).train(), torch.device("cpu")
        self.obstacle = obstacle(self.policy.hf.config)
        if not self.obstacle:
            self.policy.use_stretches()

    def __call__(self, *args: Any) -> Any:
        return self.policy(*args)


def tried(family: str, more: dict[str, Any]) -> Row | None:
    """Probe one family and return its row, or None if there is no small model of it."""
    from rose.trainer import probe

    shown = {k: v["rope_type"] if isinstance(v, dict) else v for k, v in more.items()}
    variant = ", ".join(f"{k}={v}" for k, v in shown.items())
    with tempfile.TemporaryDirectory() as folder:
        try:
            save(family, more, folder)
        except Exception as error:
            # The errors of families' own code have no common base class.
            print(f"{family}: not made: {type(error).__name__}: {error}"[:200], file=sys.stderr)
            return None
        try:
            engine = Engine(folder)
            probe.check(engine, folder, CONTEXT, not engine.obstacle)
        except Exception as error:
            return Row(family, variant, f"no: {_reason(error, folder)}", "")
    return Row(family, variant, "yes", engine.obstacle or "yes")


def _reason(error: Exception, folder: str) -> str:
    said = str(error).partition("\n")[0].removeprefix(f"model {folder}: ")
    for end in (", more than", "; ", ", which the trainer", " yet. "):
        said = said.partition(end)[0]
    return said


def main() -> None:
    import torch
    from transformers.utils import logging

    torch.set_num_threads(1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    rows = [row for each in families() if (row := tried(*each)) is not None]
    put(PAGE, "models", markdown(("`model_type`", "with", "trained", "prefix trees"), rows))


if __name__ == "__main__":
    main()
