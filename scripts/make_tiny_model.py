"""Makes the tiny model of the default run: tokenizer, Qwen3-architecture decoder, supervised warm
start.

    python scripts/make_tiny_model.py --seed 1 --out DIR

The warm start imitates a weak demonstrator on FrozenLake, in the very conversation format of a
rollout, so that the model knows how to call a tool and plays badly: the rest is left to RL. The
demonstrator avoids holes, but steps towards the goal with probability 1 - noise only. Its maps come
from even seeds >= 2**63, which no run uses (its seeds are int64), so none is a held-out one. With
--env terminal it imitates one on the ladder of that environment, each word of whose commands is
drawn at random with probability noise; seeds as above. With --experts N every layer is a mixture of
them, two to a token, each half as wide as the dense MLP. The same arguments give the same bytes on
the same machine. There is no pretraining on text.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import random
import re
import shutil
import tempfile
import time
from collections import deque
from pathlib import Path

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.utils.chat_template_utils import render_jinja_template

from rose.agent.envs import _ladder
from rose.agent.envs.base import Action, ToolCall
from rose.agent.envs.frozen_lake import DIRECTIONS, FrozenLake

FIRST_SEED = 2**63
SPECIAL = END, TURN_START, TURN_END = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TOOL_MARKS = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
VOCABULARY = 512  # a multiple of 64, as vLLM pads it
LONGEST_TOKEN = 48  # characters: the fixed part of a tool call becomes one token, the prompt a few
MAX_POSITIONS = 2048
MAX_TURNS = 10

Conversation = tuple[list[dict], list[dict]]  # chat messages, tools

# ChatML as Qwen writes it, without its long instructions on tools.
CHAT_TEMPLATE = """\
{%- for message in messages %}
{%- if message.role == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
{%- else %}
{{- '<|im_start|>' + message.role + '\\n' + (message.content or '') }}
{%- if loop.first and tools %}
{{- '\\n\\n# Tools' }}
{%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}
{%- endif %}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- (call.function.arguments | tojson) + '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""


# --------------------------------------------------------------------------- demonstrations


def distances(rows: list[list[str]]) -> dict[tuple[int, int], int]:
    """Steps to G from every cell that can reach it without touching H."""
    size = len(rows)
    goal = next((r, c) for r in range(size) for c in range(size) if rows[r][c] == "G")
    found, queue = {goal: 0}, deque([goal])
    while queue:
        r, c = queue.popleft()
        for cell in ((r, c - 1), (r + 1, c), (r, c + 1), (r - 1, c)):
            inside = 0 <= cell[0] < size and 0 <= cell[1] < size
            if inside and cell not in found and rows[cell[0]][cell[1]] != "H":
                found[cell] = found[r, c] + 1
                queue.append(cell)
    return found


def demonstrate(picture: str, noise: float, rng: random.Random) -> str:
    """The demonstrator's direction for a rendered map: a shortest path's, or with probability
    `noise` any that is no hole, walls included: cautious, but aimless."""
    rows = [line.split(" ") for line in picture.split("\n")[:-1]]
    r, c = next((r, c) for r, row in enumerate(rows) for c, cell in enumerate(row) if cell == "P")
    beside = dict(zip(DIRECTIONS, ((r, c - 1), (r + 1, c), (r, c + 1), (r - 1, c)), strict=False))
    inside = range(len(rows))
    safe = [
        d for d, (y, x) in beside.items() if y not in inside or x not in inside or rows[y][x] != "H"
    ]
    if rng.random() < noise:
        return rng.choice(safe)
    steps = distances(rows)
    best = min(steps.get(beside[d], math.inf) for d in safe)
    return rng.choice([d for d in safe if steps.get(beside[d]) == best])


async def episode(
    seed: int, lake: dict, noise: float, rng: random.Random
) -> tuple[list[dict], list[dict], bool]:
    """Return a demonstration's messages, its tools, and whether it reached the goal."""
    env = FrozenLake(**lake)
    start = await env.reset(seed)
    messages, success = list(start.messages), False
    for _ in range(MAX_TURNS):
        arguments = {"direction": demonstrate(env.render(), noise, rng)}
        messages.append(
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"function": {"name": "move", "arguments": arguments}}],
            }
        )
        step = await env.step(Action(text="", call=ToolCall("move", arguments)))
        success = step.success
        if step.done:
            break
        messages.append({"role": "tool", "content": step.observation})
    await env.close()
    return messages, start.tools, success


def demonstrations(
    count: int, lake: dict, noise: float, seed: int
) -> tuple[list[Conversation], float]:
    """`count` conversations and the demonstrator's success rate."""
    rng = random.Random(seed)

    async def play() -> list[tuple[list[dict], list[dict], bool]]:
        return [
            await episode(FIRST_SEED + 2 * rng.getrandbits(61), lake, noise, rng)
            for _ in range(count)
        ]

    played = asyncio.run(play())
    return [(messages, tools) for messages, tools, _ in played], sum(s for *_, s in played) / count


def commands(count: int, noise: float, seed: int) -> tuple[list[Conversation], float]:
    """`count` conversations of one command each on the ladder, and the demonstrator's success
    rate."""
    rng, made, right = random.Random(seed), [], 0
    for _ in range(count):
        rung = _ladder.draw(FIRST_SEED + 2 * rng.getrandbits(61))
        command = _ladder.demonstrate(rung, noise, rng)
        right += command == rung.command
        call = {"function": {"name": "bash", "arguments": {"command": command}}}
        messages = [
            {"role": "system", "content": _ladder.SYSTEM},
            {"role": "user", "content": rung.instruction},
            {"role": "assistant", "content": "", "tool_calls": [call]},
        ]
        made.append((messages, [_ladder.BASH]))
    return made, right / count


# --------------------------------------------------------------------------- tokenizer


# A direction, with or without its neighbour, as in `right H`.
WORDS = rf"(?:{'|'.join(DIRECTIONS)})(?: [FHG]| wall)?"
LADDER_WORDS = "|".join((*_ladder.NAMES, *_ladder.COLOURS))


def make_tokenizer(
    conversations: list[Conversation], words: str = f"[PFHG]|{WORDS}"
) -> PreTrainedTokenizerFast:
    """Byte-level BPE, so any text round-trips; merges are trained on demonstrations and cross
    words, so that a prompt is a few tokens. What matches `words` (a cell, a direction, a
    neighbour) stays one token."""
    core = Tokenizer(models.BPE())
    alone = Regex(rf"[ \n]?\b(?:{words})\b")
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(alone, "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    core.decoder = decoders.ByteLevel()
    # never merged into other tokens
    marks = re.compile("|".join(map(re.escape, SPECIAL + TOOL_MARKS)))
    pieces = [piece for text in map(to_text, conversations) for piece in marks.split(text)]
    core.train_from_iterator(
        pieces,
        trainers.BpeTrainer(
            vocab_size=VOCABULARY - len(TOOL_MARKS),
            special_tokens=SPECIAL,
            max_token_length=LONGEST_TOKEN,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    # visible in decoded text, as Qwen's
    core.add_tokens([AddedToken(mark, normalized=False) for mark in TOOL_MARKS])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        chat_template=CHAT_TEMPLATE,
        eos_token=TURN_END,
        pad_token=END,
        clean_up_tokenization_spaces=False,
        model_max_length=MAX_POSITIONS,
    )


def to_text(conversation: Conversation) -> str:
    messages, tools = conversation
    return render_jinja_template([messages], tools=tools, chat_template=CHAT_TEMPLATE)[0][0]


# --------------------------------------------------------------------------- model and warm start


def make_model(vocab: int, seed: int, args: argparse.Namespace) -> PreTrainedModel:
    torch.manual_seed(seed)
    shape = dict(
        vocab_size=vocab,
        hidden_size=args.hidden,
        intermediate_size=2 * args.hidden,
        num_hidden_layers=args.layers,
        num_attention_heads=args.hidden // 32,
        num_key_value_heads=max(1, args.hidden // 64),
        head_dim=32,
        max_position_embeddings=MAX_POSITIONS,
        rope_parameters={"rope_type": "default", "rope_theta": 1_000.0},
        tie_word_embeddings=True,
        dtype="float32",
        attn_implementation="sdpa",
        # 0.02 is too small for this width: the warm start then never reads the map
        initializer_range=0.08,
    )
    if not args.experts:
        return Qwen3ForCausalLM(Qwen3Config(**shape))
    mixture = dict(
        num_experts=args.experts,
        num_experts_per_tok=2,
        moe_intermediate_size=args.hidden,
        norm_topk_prob=True,
    )
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**shape, **mixture))


def encode(
    tokenizer: PreTrainedTokenizerFast, conversations: list[Conversation]
) -> tuple[torch.Tensor, torch.Tensor]:
    """(N, T) int64 tokens, right-padded, and labels: the tokens of assistant turns, -100
    elsewhere."""
    start, end = tokenizer.convert_tokens_to_ids([TURN_START, TURN_END])
    assistant = tokenizer.encode("assistant\n", add_special_tokens=False)
    rows, labels = [], []
    for conversation in conversations:
        ids = tokenizer.encode(to_text(conversation), add_special_tokens=False)
        row = [-100] * len(ids)
        for i, token in enumerate(ids):
            first = i + 1 + len(assistant)
            if token == start and ids[i + 1 : first] == assistant:
                last = ids.index(end, first)
                row[first : last + 1] = ids[first : last + 1]
        rows.append(torch.tensor(ids))
        labels.append(torch.tensor(row))
    pad = torch.nn.utils.rnn.pad_sequence
    return pad(rows, True, tokenizer.pad_token_id), pad(labels, True, -100)


def warm_start(
    model: PreTrainedModel, tokens: torch.Tensor, labels: torch.Tensor, args: argparse.Namespace
) -> None:
    """`args.steps` AdamW steps on batches of `args.batch` demonstrations, learning rate falling to
    0."""
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.01
    )
    ramp = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda i: min(1.0, (i + 1) / 10) * (1 - i / args.steps)
    )
    began = time.monotonic()
    for step in range(args.steps):
        chosen = torch.arange(step * args.batch, (step + 1) * args.batch) % len(tokens)
        batch, target = tokens[chosen], labels[chosen]
        length = int((target != -100).any(0).nonzero().max()) + 1
        loss = model(input_ids=batch[:, :length], labels=target[:, :length], use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        ramp.step()
        optimizer.zero_grad()
        if (step + 1) % 60 == 0 or step + 1 == args.steps:
            print(
                f"  warm start: step {step + 1}/{args.steps}, loss {loss.item():.3f}, "
                f"{time.monotonic() - began:.0f} s",
                flush=True,
            )


def save(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, recipe: dict, out: Path
) -> None:
    """Into a folder beside `out`, then renamed, so that `out` is there whole or not at all."""
    out.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=out.name + ".", dir=out.parent))
    try:
        ends = tokenizer.convert_tokens_to_ids([TURN_END, END])
        model.generation_config = GenerationConfig(
            eos_token_id=ends, pad_token_id=ends[1], do_sample=True
        )
        model.config.eos_token_id, model.config.pad_token_id = ends
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        (folder / "recipe.json").write_text(json.dumps(recipe, indent=2) + "\n")
        folder.chmod(0o755)
        os.rename(folder, out)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder to make; must not exist")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--env", choices=["frozen_lake", "terminal"], default="frozen_lake")
    parser.add_argument("--size", type=int, default=4, help="of the lakes demonstrated")
    parser.add_argument("--hole-probability", type=float, default=0.2)
    parser.add_argument("--noise", type=float, default=0.6, help="probability of an aimless move")
    parser.add_argument("--hidden", type=int, default=64, help="multiple of 64")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--experts", type=int, default=0, help="of each layer; 0: a dense MLP")
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--batch", type=int, default=8, help="demonstrations a step")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument(
        "--threads", type=int, default=1, help="part of the recipe: sums depend on it"
    )
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    if args.out.exists():
        raise SystemExit(f"--out {args.out}: exists already; remove it or give another folder")
    torch.set_num_threads(args.threads)
    torch.use_deterministic_algorithms(True)
    count = args.steps * args.batch
    if args.env == "terminal":
        shown, rate = commands(count, args.noise, args.seed)
        tokenizer = make_tokenizer(shown[:500], LADDER_WORDS)
    else:
        lake = {"size": args.size, "hole_probability": args.hole_probability}
        shown, rate = demonstrations(count, lake, args.noise, args.seed)
        tokenizer = make_tokenizer(shown[:500])
    tokens, labels = encode(tokenizer, shown)
    model = make_model(64 * math.ceil(len(tokenizer) / 64), args.seed, args)
    print(
        f"tiny model: {model.num_parameters():,} parameters, {len(tokenizer)} tokens; "
        f"demonstrator's success {rate:.2f}",
        flush=True,
    )
    warm_start(model, tokens, labels, args)
    recipe = {key: value for key, value in vars(args).items() if key != "out"}
    save(model, tokenizer, recipe, args.out)
    print(f"saved in {args.out}", flush=True)


if __name__ == "__main__":
    main()
