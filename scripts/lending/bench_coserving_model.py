"""Create a random model of bench_coserving.py: Qwen3 architecture, one token a word.

    python -m scripts.lending.bench_coserving_model OUT HIDDEN LAYERS SEED

Weights are random, because the bench measures time, which does not depend on them.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from rose.files import whole

VOCABULARY = 4096
END, WORD = 0, "<end>"  # the only special token; prompts use the other tokens
POSITIONS = 4096
HEAD = 64


def save(out: Path, hidden: int, layers: int, seed: int) -> None:
    """Save a model in `out`. `hidden` must be a multiple of 128."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // HEAD,
        num_key_value_heads=hidden // HEAD // 2,
        head_dim=HEAD,
        max_position_embeddings=POSITIONS,
        tie_word_embeddings=True,
        eos_token_id=END,
        bos_token_id=None,
        dtype="float32",
    )
    words = {WORD: END} | {f"w{number}": number for number in range(1, VOCABULARY)}
    core = Tokenizer(models.WordLevel(words, unk_token=WORD))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    marks = dict.fromkeys(("eos_token", "pad_token", "unk_token"), WORD)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, model_max_length=POSITIONS, **marks)
    model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(eos_token_id=END, pad_token_id=END)
    out.parent.mkdir(parents=True, exist_ok=True)
    with whole(out) as part:
        model.save_pretrained(part)
        tokenizer.save_pretrained(part)


if __name__ == "__main__":
    save(Path(sys.argv[1]), *map(int, sys.argv[2:5]))
