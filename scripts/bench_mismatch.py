"""Log-probability difference between the engine (vLLM) and the trainer's forward (transformers),
same weights.

    python scripts/bench_mismatch.py                     # the tiny model of the default run
    python scripts/bench_mismatch.py --model FOLDER      # any Hugging Face folder
    python scripts/bench_mismatch.py --gpus              # on a machine with a GPU

Samples turns from the engine at temperature 1 and scores the same tokens with transformers in the
same dtype. With d = logprob(trainer) - logprob(engine) of each token: mean and max of |d|,
KL(engine || trainer) by the k3 estimator exp(d) - 1 - d (Schulman, joschu.net/blog/kl-approx.html),
and the largest importance ratio exp(d). Prints one table; exit code 1 if float32 disagrees anywhere
by more than 1e-3, on GPUs 1e-2: FlashAttention takes no float32, and the products of the Triton
kernel that vLLM runs instead are TF32 (ten bits). Left out: other dtypes, TP.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from pathlib import Path

import msgspec
import numpy as np
import torch
import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rose import config, models, protocol  # noqa: E402
from rose.engine.vllm_engine import Engine  # noqa: E402

CONF = Path(__file__).resolve().parents[1] / "conf"
FLOAT32_LIMIT = {"cpu": 1e-3, "cuda": 1e-2}


async def sample(
    folder: Path, dtype: str, arguments
) -> list[tuple[list[int], list[int], list[float]]]:
    """(prompt, new tokens, engine logprobs) of `--turns` turns."""
    rollout = msgspec.convert(
        yaml.safe_load((CONF / "rollout/cpu.yaml").read_text()), config.Rollout
    )
    tiny = msgspec.convert(yaml.safe_load((CONF / "model/tiny.yaml").read_text()), config.Model)
    model = msgspec.structs.replace(
        tiny, dtype=dtype, max_context=arguments.prompt_tokens + arguments.new_tokens
    )
    vocab = config.read_shape(folder).vocab
    generator = np.random.default_rng(arguments.seed)
    prompts = [
        generator.integers(0, vocab, arguments.prompt_tokens).tolist()
        for _ in range(arguments.turns)
    ]
    engine = await Engine.start(folder, rollout, model, gpus=arguments.gpus, seed=arguments.seed)

    async def turn(i: int) -> tuple[list[int], list[int], list[float]]:
        tokens, logprobs = [], []
        sampling = protocol.Sampling(max_new_tokens=arguments.new_tokens)
        async for chunk in engine.generate(f"turn-{i}", protocol.pack_tokens(prompts[i]), sampling):
            tokens += chunk.tokens
            logprobs += chunk.logprobs
        return prompts[i], tokens, logprobs

    try:
        return await asyncio.gather(*(turn(i) for i in range(arguments.turns)))
    finally:
        await engine.shutdown()


@torch.no_grad()
def score(folder: Path, dtype: str, turns, device: str) -> np.ndarray:
    """logprob(trainer) of every new token, all turns in a row."""
    from transformers import AutoModelForCausalLM

    model = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).to(device).eval()
    )
    scores = []
    for prompt, tokens, _ in turns:
        ids = torch.tensor([prompt + tokens], device=device)
        # (new tokens, vocabulary)
        logprobs = model(ids).logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
        scores.append(logprobs.gather(1, ids[0, len(prompt) :, None])[:, 0].cpu().numpy())
    return np.concatenate(scores)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", type=Path, help="Hugging Face folder; default: the tiny model, made if absent"
    )
    parser.add_argument("--turns", type=int, default=32)
    parser.add_argument("--prompt-tokens", type=int, default=64, help="random token ids")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--gpus", action="store_true")
    arguments = parser.parse_args()
    tiny = msgspec.convert(yaml.safe_load((CONF / "model/tiny.yaml").read_text()), config.Model)
    folder = arguments.model or models.resolve(tiny)
    print(
        f"model {folder}\n{'dtype':9} {'tokens':>7} {'mean |d|':>10} {'max |d|':>10} {'KL k3':>10} {'max ratio':>10} "
        f"{'seconds':>8}",
        flush=True,
    )
    worst, device = 0.0, "cuda" if arguments.gpus else "cpu"
    for dtype in ("float32", "bfloat16"):
        start = time.monotonic()
        turns = asyncio.run(sample(folder, dtype, arguments))
        engine = np.concatenate([np.asarray(logprobs) for _, _, logprobs in turns])
        d = score(folder, dtype, turns, device) - engine
        print(
            f"{dtype:9} {d.size:7d} {np.abs(d).mean():10.2e} {np.abs(d).max():10.2e} "
            f"{(np.exp(d) - 1 - d).mean():10.2e} {np.exp(d).max():10.5f} {time.monotonic() - start:8.1f}",
            flush=True,
        )
        worst = max(worst, np.abs(d).max() if dtype == "float32" else 0.0)
    return int(worst > FLOAT32_LIMIT[device])


if __name__ == "__main__":
    sys.exit(main())
