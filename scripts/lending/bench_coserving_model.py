"""Create the random models of bench_coserving.py: Qwen3 architecture, one token a word.

    python scripts/lending/bench_coserving_model.py OUT HIDDEN LAYERS SEED

Weights are random, because the bench measures time, which does not depend on them. `OUT` is written
whole or not at all.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

VOCABULARY = 4096
END = 0  # the only special token; prompts use the other tokens
POSITIONS = 4096
HEAD = 64


def save(out: Path, hidden: int, layers: int, seed: int) -> int:
    """Save a model in `out` and return its parameters. `hidden` must be a multiple of 128."""
    torch.manual_seed(seed)
    heads = hidden // HEAD
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=VOCABULARY,
            hidden_size=hidden,
            intermediate_size=3 * hidden,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=heads // 2,
            head_dim=HEAD,
            max_position_embeddings=POSITIONS,
            tie_word_embeddings=True,
            eos_token_id=END,
            bos_token_id=None,
            dtype="float32",
        )
    )
    words = {"<end>": END} | {f"w{number}": number for number in range(1, VOCABULARY)}
    core = Tokenizer(models.WordLevel(words, unk_token="<end>"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token="<end>",
        pad_token="<end>",
        unk_token="<end>",
        model_max_length=POSITIONS,
    )
    out.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=out.name + ".", dir=out.parent))
    try:
        model.generation_config = GenerationConfig(eos_token_id=END, pad_token_id=END)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        folder.chmod(0o755)
        os.rename(folder, out)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return model.num_parameters()


if __name__ == "__main__":
    print(save(Path(sys.argv[1]), *map(int, sys.argv[2:5])))
