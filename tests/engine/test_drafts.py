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
from rose.engine import vllm_engine
from rose.engine.vllm_engine import Engine
from tests.engine.conftest import make_model
from tests.engine.test_vllm_engine import (
    DEADLINE_S,
    PROMPTS,
    agrees,
    arrives_mid_turn,
    perturbed,
    publish,
    reference,
    turn,
)

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


@pytest.mark.parametrize("method", ["group", "ngram"])
@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_sampled_tokens_have_the_models_distribution(wait, folder, engine_with, method, sampling):
    engine = engine_with(method)
    before = engine.stats()
    tokens = wait(samples(engine, f"g{hash(str(sampling)) % 1000}", sampling))
    after = engine.stats()
    check_distribution(tokens, distributions(folder, tokens, sampling))
    assert after.drafted - before.drafted > 1000
    assert after.accepted - before.accepted > 300


@pytest.mark.parametrize("sampling", list(SAMPLINGS.values())[:2], ids=list(SAMPLINGS)[:2])
def test_marginals_are_those_without_drafts(wait, engine_with, sampling):
    without = wait(samples(engine_with("none"), "g8", sampling))
    drafted = wait(samples(engine_with("group"), "g8", sampling))
    for position in (3, 6, 10):
        both = [x[:, position][x[:, position] >= 0] for x in (without, drafted)]
        counts = np.array([np.bincount(x, minlength=263) for x in both])
        often = counts.sum(0) >= 12
        table = np.concatenate([counts[:, often], counts[:, ~often].sum(1, keepdims=True)], 1)
        table = table[:, table.sum(0) > 0]
        expected = np.outer(table.sum(1), table.sum(0)) / table.sum()
        assert p_value(table, expected, table.shape[1] - 1) > WORST_P


def test_log_probabilities_are_the_models(wait, folder, engine_with):
    model = AutoModelForCausalLM.from_pretrained(folder).float().eval()
    drawn = protocol.Sampling(max_new_tokens=ALONE, temperature=0.7, top_k=12)
    for i in range(3):
        found = wait(turn(engine_with("group"), f"g4.{i}.t0#1", PROMPT, drawn))
        _, own = reference(model, PROMPT, found["tokens"])
        np.testing.assert_allclose(found["logprobs"], own, atol=1e-3)


def steps_of(wait, engine, name: str) -> tuple[list[int], int]:
    """A greedy turn's tokens, and the engine's steps for it."""
    before = engine.stats().steps
    sampling = protocol.Sampling(max_new_tokens=ALONE, temperature=0.0)
    found = wait(turn(engine, name, PROMPT, sampling))
    return found["tokens"], engine.stats().steps - before


def test_a_siblings_words_are_drafted_and_greedy_turns_stay(wait, engine_with, monkeypatch):
    engine = engine_with("group")
    wanted, alone = steps_of(wait, engine_with("none"), "g5.0.t0#1")
    packed = protocol.pack_tokens(wanted)
    before = protocol.pack_tokens(PROMPT[-16:])
    monkeypatch.setattr(vllm_engine, "RPC_TIMEOUT_S", 0.0)  # ends engines, but not over hints
    wait(engine.learn_siblings([("g5.0.t0", 0, before, packed)], []))
    tokens, fed = steps_of(wait, engine, "g5.1.t0#1")
    assert tokens == wanted and fed < alone / 3
    wait(engine.learn_siblings([], ["g5"]))
    again, forgotten = steps_of(wait, engine, "g5.2.t0#1")
    assert again == wanted and forgotten > fed


def test_a_drafting_turn_that_is_aborted_goes_on_elsewhere_from_its_tokens(wait, engine_with):
    wanted, _ = steps_of(wait, engine_with("none"), "g6.0.t0#1")
    steps_of(wait, engine_with("group"), "g6.1.t0#1")  # The next turn drafts from its text.

    async def aborted() -> list[int]:
        made: list[int] = []
        sampling = protocol.Sampling(max_new_tokens=ALONE, temperature=0.0)
        prompt = protocol.pack_tokens(PROMPT)
        async for chunk in engine_with("group").generate("g6.2.t0#1", prompt, sampling):
            made += chunk.tokens
            await engine_with("group").abort("g6.2.t0#1")
        return made

    part = wait(aborted())
    assert part == wanted[: len(part)]
    rest = protocol.Sampling(max_new_tokens=max(1, ALONE - len(part)), temperature=0.0)
    found = turn(engine_with("ngram"), "g6.2.t0#2", PROMPT + part, rest)
    if len(part) < len(wanted):
        assert part + wait(found)["tokens"] == wanted
    else:
        found.close()


@pytest.mark.parametrize("in_flight", ["recompute", "keep"])
def test_new_weights_meet_drafting_turns(wait, folder, rollout, model_config, tmp_path, in_flight):
    scheduler = {"scheduler_cls": "tests.engine.schedulers.PlainPatientScheduler"}
    draft = Draft("group", 5, adaptive=False, memory_mib=16)
    settings = msgspec.structs.replace(rollout, draft=draft, engine_args=scheduler)
    engine = wait(Engine.start(folder, settings, model_config))
    try:
        old = AutoModelForCausalLM.from_pretrained(folder).float().eval()
        new = perturbed(folder)
        store = publish(tmp_path / "store", folder, 1, new)
        meeting = arrives_mid_turn(engine, store, in_flight)
        found, late = wait(asyncio.wait_for(meeting, DEADLINE_S))
        assert engine.stats().accepted > 0
    finally:
        wait(engine.shutdown())
    cut = found["versions"].index(1)
    assert set(found["versions"][:cut]) == {-1} and set(found["versions"][cut:]) == {1}
    agrees(new, [late], [PROMPTS[3]])
    for model, part in ((old, slice(0, cut)), (new, slice(cut, None))):
        if model is new and in_flight == "keep":  # its KV cache is the old weights'
            continue
        tokens, logprobs = reference(model, PROMPTS[2], found["tokens"])
        assert found["tokens"][part] == tokens[part]
        np.testing.assert_allclose(found["logprobs"][part], logprobs[part], atol=1e-3)
