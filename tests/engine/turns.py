"""Turns of a real engine, the versions that it loads meanwhile, and the same by transformers."""

import asyncio
from pathlib import Path

import msgspec
import numpy as np
import torch
import yaml
from transformers import AutoModelForCausalLM

from rose import config, protocol
from rose.config import read_shape
from rose.engine import layout
from tests.trainer.test_experts import in_parts
from tests.transfer.worlds import World

CONF = Path(__file__).parents[2] / "conf"
PROMPTS = [np.random.default_rng(i).integers(2, 263, size=20 + 7 * i).tolist() for i in range(6)]
DEADLINE_S = 120.0
GREEDY = protocol.Sampling(max_new_tokens=24, temperature=0.0)
LONG = protocol.Sampling(max_new_tokens=200, temperature=0.0)


async def turn(engine, name: str, prompt: list[int], sampling=GREEDY) -> dict:
    tokens, logprobs, versions = [], [], []
    async for chunk in engine.generate(name, protocol.pack_tokens(prompt), sampling):
        tokens += chunk.tokens
        logprobs += chunk.logprobs
        versions += [chunk.version] * len(chunk.tokens)
    assert len(tokens) == len(logprobs)
    made = {"tokens": tokens, "logprobs": logprobs, "versions": versions}
    return made | {"finish": chunk.finish, "cached": chunk.cached_tokens}


async def turns(engine, prompts=PROMPTS, sampling=GREEDY, tag: str = "t") -> list[dict]:
    made = (turn(engine, f"{tag}{i}", prompt, sampling) for i, prompt in enumerate(prompts))
    return await asyncio.gather(*made)


async def generated(engine, tokens: int) -> None:
    """Wait until the engine has generated that many tokens in all."""
    while engine.stats().generated_tokens < tokens:
        await asyncio.sleep(0.005)


@torch.no_grad()
def reference(model, prompt: list[int], tokens: list[int]) -> tuple[list[int], list[float]]:
    """Greedy choice and log-probability of each of `tokens` by transformers."""
    logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    logprobs = logits.float().log_softmax(-1)
    chosen = logprobs.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    return logprobs.argmax(-1).tolist(), chosen.tolist()


def model_of(folder):
    """transformers' own."""
    return AutoModelForCausalLM.from_pretrained(folder).float().eval()


def scheduled_by(kind: str) -> dict:
    """Engine arguments that select a scheduler of tests/engine/schedulers.py."""
    return {"scheduler_cls": f"tests.engine.schedulers.{kind}Scheduler"}


def weights_of(model) -> dict[str, torch.Tensor]:
    """Return the weights as the model's folder has them: tied ones once, each expert by itself."""
    return {name: part.clone() for name, part in in_parts(model).items()}


def trainers(store, folder, degrees=(1, 2), **options) -> World:
    """Two trainer ranks that hold the folder's weights."""
    shape = read_shape(folder)
    weights = weights_of(model_of(folder))
    cuts = {n: layout.cuts(n, tuple(t.shape), shape, degrees) for n, t in weights.items()}
    return World(store, weights, cuts, largest=5000, **options)


def publish(store, folder, version: int, model) -> str:
    world = trainers(store, folder)
    world.weights = weights_of(model)
    world.publish(version)
    return str(store)


def settings(**changes) -> config.Transfer:
    raw = yaml.safe_load((CONF / "transfer/sparse.yaml").read_text())
    made = msgspec.convert(raw, config.Transfer)
    return msgspec.structs.replace(made, **({"threads": 1, "in_flight": "recompute"} | changes))


def perturbed(folder):
    model = model_of(folder)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator))
    return model


def agrees(model, results, prompts=PROMPTS, atol=1e-3, greedy=True) -> None:
    """Tokens, if they are greedy, and their log-probabilities are the model's."""
    for prompt, result in zip(prompts, results, strict=True):
        tokens, logprobs = reference(model, prompt, result["tokens"])
        assert result["tokens"] == tokens or not greedy
        np.testing.assert_allclose(result["logprobs"], logprobs, atol=atol)


def part_agrees(model, result, part: slice, prompt, atol=1e-3) -> None:
    """The same of a part of one greedy turn's tokens."""
    tokens, logprobs = reference(model, prompt, result["tokens"])
    assert result["tokens"][part] == tokens[part]
    np.testing.assert_allclose(result["logprobs"][part], logprobs[part], atol=atol)


def dies(wait, engine) -> None:
    """The engine's end is noticed in time."""
    wait(asyncio.wait_for(asyncio.shield(engine.died), DEADLINE_S))


async def arrives_mid_turn(engine, store: str, in_flight: str) -> tuple[dict, dict]:
    """(a turn during which version 1 comes, one that is asked for meanwhile)."""
    before = engine.stats().generated_tokens
    running = asyncio.ensure_future(turn(engine, "t", PROMPTS[2], LONG))
    await generated(engine, before + 20)
    loading = asyncio.ensure_future(engine.load_version(1, store, settings(in_flight=in_flight)))
    while engine.open and not loading.done():
        await asyncio.sleep(0.001)
    late = asyncio.ensure_future(turn(engine, "late", PROMPTS[3], GREEDY))
    await loading
    return await running, await late
