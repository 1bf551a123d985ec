"""Drafts change how many tokens a step makes and nothing else: what is sampled has the model's own
distribution, with the request's temperature, top-p and top-k, at drafted positions, too."""

import asyncio
from zlib import crc32

import msgspec
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from rose import protocol
from rose.config import Draft
from rose.engine.vllm_engine import Engine
from tests.engine.conftest import make_model

pytestmark = pytest.mark.slow
PROMPT = np.random.default_rng(5).integers(2, 263, size=24).tolist()
TURNS, TOKENS = 1200, 14
SURE = 4.0  # times the random model's logits
# Chances of a false alarm far below one in ten thousand; vLLM without the mending is beyond them by
# a factor of ten with a tenth of the tokens.
WORST_Z, WORST_P = 4.5, 1e-5
SAMPLINGS = {
    "temperature 1": dict(temperature=1.0),
    "temperature 0.7": dict(temperature=0.7),
    "top-p 0.9": dict(temperature=1.0, top_p=0.9),
    "top-k 12": dict(temperature=0.7, top_k=12),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A random model that is surer than others of what comes next, so that drafts are accepted."""
    model = make_model("Qwen3")
    with torch.no_grad():
        model.model.norm.weight.mul_(SURE)
    path = tmp_path_factory.mktemp("sure")
    model.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def engine_with(wait, folder, rollout, model_config):
    """engine_with(method) -> an engine that drafts whatever it can."""
    made = {}

    def engine_with(method: str) -> Engine:
        if method not in made:
            draft = Draft(method, 5, adaptive=False, memory_mib=16)
            settings = msgspec.structs.replace(rollout, draft=draft)
            made[method] = wait(Engine.start(folder, settings, model_config))
        return made[method]

    yield engine_with
    for engine in made.values():
        wait(engine.shutdown())


def p_value(counts: np.ndarray, expected: np.ndarray, freedom: int) -> float:
    """Of a chi-squared that is as large."""
    squared = ((counts - expected) ** 2 / expected).sum()
    half = torch.tensor([freedom / 2, squared / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


async def samples(engine, group: str, sampling: dict, turns: int = TURNS) -> np.ndarray:
    """Turns of one group with the same prompt, (turns, TOKENS); -1 after a turn's end."""
    sampling = protocol.Sampling(max_new_tokens=TOKENS, **sampling)

    async def one(name: str) -> list[int]:
        prompt = protocol.pack_tokens(PROMPT)
        return [t async for chunk in engine.generate(name, prompt, sampling) for t in chunk.tokens]

    found = await asyncio.gather(*(one(f"{group}.{i}.t0#1") for i in range(turns)))
    return np.array([tokens + [-1] * (TOKENS - len(tokens)) for tokens in found])


@torch.no_grad()
def distributions(folder, tokens: np.ndarray, sampling: dict) -> np.ndarray:
    """(turns, TOKENS, vocabulary): what each token should have been drawn from, by transformers."""
    model = AutoModelForCausalLM.from_pretrained(folder).float().eval()
    prompts = np.tile(PROMPT, (len(tokens), 1))
    context = torch.tensor(np.concatenate([prompts, np.maximum(tokens, 0)], 1))
    logits = torch.cat([model(part).logits for part in context.split(200)])
    logits = logits[:, len(PROMPT) - 1 : -1].double() / sampling["temperature"]
    if k := sampling.get("top_k"):
        logits[logits < logits.topk(k).values[..., -1:]] = -torch.inf
    chances = logits.softmax(-1)
    if top_p := sampling.get("top_p"):
        ordered, order = chances.sort(-1, descending=True)
        ordered[ordered.cumsum(-1) - ordered > top_p] = 0
        chances = torch.zeros_like(chances).scatter(-1, order, ordered)
        chances /= chances.sum(-1, keepdim=True)
    return chances.numpy()


def check_distribution(tokens: np.ndarray, chances: np.ndarray) -> None:
    """Each token against the distribution that it should be of: whether log-probabilities have the
    mean that they should have, and how likely a chi-squared of the tokens' quantiles is."""
    there = tokens >= 0
    of, q = tokens[there], chances[there]
    drawn = q[np.arange(len(of)), of]
    assert (drawn > 0).mean() > 0.999  # but for rounding at the edge of top-p
    of, q, drawn = of[drawn > 0], q[drawn > 0], drawn[drawn > 0]
    logs = np.log(np.where(q > 0, q, 1))
    mean = (q * logs).sum(1)
    variance = (q * logs**2).sum(1) - mean**2
    assert abs((np.log(drawn) - mean).sum() / np.sqrt(variance.sum())) < WORST_Z
    below = np.where(np.arange(q.shape[1]) < of[:, None], q, 0).sum(1)
    quantiles = below + np.random.default_rng(1).random(len(of)) * drawn
    counts = np.histogram(quantiles, bins=25, range=(0, 1))[0]
    assert p_value(counts, np.full(len(counts), len(of) / len(counts)), len(counts) - 1) > WORST_P


def check_drafts(wait, folder, engine: Engine, sampling: dict) -> None:
    """Sampled tokens have the model's distribution, and many were drafted."""
    before = engine.stats()
    tokens = wait(samples(engine, f"g{crc32(str(sampling).encode())}", sampling))
    after = engine.stats()
    check_distribution(tokens, distributions(folder, tokens, sampling))
    assert after.drafted - before.drafted > 1000
    assert after.accepted - before.accepted > 300


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_sampled_tokens_have_the_models_distribution(wait, folder, engine_with, sampling):
    check_drafts(wait, folder, engine_with("ngram"), sampling)
