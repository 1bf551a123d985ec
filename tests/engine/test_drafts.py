"""Drafts change how many tokens a step makes and nothing else: what is sampled has the model's own
distribution, with the request's temperature, top-p and top-k, at drafted positions, too."""

import asyncio

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
TURNS, TOKENS, ALONE = 1200, 14, 64
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
def engine_with(loop, folder, rollout, model_config):
    """engine_with(method) -> an engine that drafts whatever it can."""
    made = {}

    def engine_with(method: str) -> Engine:
        if method not in made:
            draft = Draft(method, 5, adaptive=False, memory_mib=16)
            settings = msgspec.structs.replace(rollout, draft=draft)
            made[method] = loop.run_until_complete(Engine.start(folder, settings, model_config))
        return made[method]

    yield engine_with
    for engine in made.values():
        loop.run_until_complete(engine.shutdown())


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


@pytest.mark.parametrize("method", ["group", "ngram"])
@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_sampled_tokens_have_the_models_distribution(loop, folder, engine_with, method, sampling):
    engine = engine_with(method)
    before = engine.stats()
    tokens = loop.run_until_complete(samples(engine, f"g{hash(str(sampling)) % 1000}", sampling))
    after = engine.stats()
    check_distribution(tokens, distributions(folder, tokens, sampling))
    assert after.drafted - before.drafted > 1000
    assert after.accepted - before.accepted > 300


@pytest.mark.parametrize("sampling", list(SAMPLINGS.values())[:2], ids=list(SAMPLINGS)[:2])
def test_marginals_are_those_without_drafts(loop, engine_with, sampling):
    without = loop.run_until_complete(samples(engine_with("none"), "g8", sampling))
    drafted = loop.run_until_complete(samples(engine_with("group"), "g8", sampling))
    for position in (3, 6, 10):
        both = [x[:, position][x[:, position] >= 0] for x in (without, drafted)]
        counts = np.array([np.bincount(x, minlength=263) for x in both])
        often = counts.sum(0) >= 12
        table = np.concatenate([counts[:, often], counts[:, ~often].sum(1, keepdims=True)], 1)
        table = table[:, table.sum(0) > 0]
        expected = np.outer(table.sum(1), table.sum(0)) / table.sum()
        assert p_value(table, expected, table.shape[1] - 1) > WORST_P


def test_log_probabilities_are_the_models_and_greedy_turns_are_unchanged(loop, folder, engine_with):
    engine, model = engine_with("group"), AutoModelForCausalLM.from_pretrained(folder)

    async def one(engine, name, sampling):
        chunks = [c async for c in engine.generate(name, protocol.pack_tokens(PROMPT), sampling)]
        return sum((c.tokens for c in chunks), []), sum((c.logprobs for c in chunks), [])

    greedy = protocol.Sampling(max_new_tokens=ALONE, temperature=0.0)
    drawn = protocol.Sampling(max_new_tokens=ALONE, temperature=0.7, top_k=12)
    wanted, _ = loop.run_until_complete(one(engine_with("none"), "g3.0.t0#1", greedy))
    for i in range(3):
        assert loop.run_until_complete(one(engine, f"g3.{i}.t0#1", greedy))[0] == wanted
        tokens, logprobs = loop.run_until_complete(one(engine, f"g4.{i}.t0#1", drawn))
        with torch.no_grad():
            logits = model.float()(torch.tensor([PROMPT + tokens])).logits[0, len(PROMPT) - 1 : -1]
        own = logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
        np.testing.assert_allclose(logprobs, own, atol=1e-3)
