"""The check of speculative decoding for gpu_check.py: drafts must not change the distribution."""

from __future__ import annotations

import asyncio

import numpy as np

from tests.gpu import engine
from tests.gpu.frame import Report, check
from tests.gpu.model import folder

TEMPERATURE = 0.25  # low, because a random model is sure of nothing and would accept no draft
BINS = 25
# Bounds that a correct engine exceeds by chance once in ten thousand runs. vLLM's CPU kernel
# without ROSE's fix exceeds them tenfold.
WORST_Z, WORST_CHI_SQUARED = 4.0, 62.0
WORDS = (
    "drafted positions are sampled wrongly: rollout/draft=none, and tell ROSE's maintainers the GPU"
)
GPU = engine.Engines("gpu", "float32", 0.5, 128, 64, 64, 0, 0, 0, 0.0, 0, 0)
CPU = engine.Engines("cpu", "float32", 0.9, 32, 24, 24, 0, 0, 0, 0.0, 0, 0)


@check(
    "an engine that drafts from a turn's own text samples the model's own distribution",
    "the engine's words are in the log; rollout/draft=none does without",
    {"cuda": GPU, "cpu": CPU},
)
async def drafts(report: Report) -> None:
    """Run turns of one prompt all at once, with drafts from their own text."""
    config = engine.settings(report, "rollout/draft=ngram", "rollout.draft.tokens=5")
    running, sizes = await engine.start(report, config), report.sizes
    try:
        engine.ways(report, running)
        prompt = engine.prompts(report, 1, 13)[0]
        before = running.stats()
        new, names = sizes.new, [f"turn-{i}" for i in range(sizes.turns)]
        each = (engine.turn(running, n, prompt, new, temperature=TEMPERATURE) for n in names)
        made = await asyncio.gather(*each)
        after = running.stats()
        alone = await engine.turn(running, "alone", prompt, sizes.new, temperature=0.0)
        again = await engine.turn(running, "again", prompt, sizes.new, temperature=0.0)
    finally:
        await running.shutdown()
    report.figure("drafted", after.drafted - before.drafted, "tokens", least=1)
    accepted = after.accepted - before.accepted
    remedy = "the proposer finds nothing in a turn's text, or all of its drafts are refused"
    report.figure("accepted", accepted, "tokens", least=1, remedy=remedy)
    report.figure("a greedy turn, twice: same tokens", alone.tokens == again.tokens, equal=True)
    z, chi_squared = _surprise(report, prompt, [one.tokens[: sizes.new] for one in made])
    report.figure("mean log-probability, deviations off", abs(z), most=WORST_Z, remedy=WORDS)
    name = f"chi-squared of quantiles, {BINS - 1} degrees of freedom"
    report.figure(name, chi_squared, most=WORST_CHI_SQUARED, remedy=WORDS)


def _surprise(report: Report, prompt: list[int], turns: list[list[int]]) -> tuple[float, float]:
    """Compare all tokens with the distributions that transformers computes. Return the standard
    deviations by which their mean log-probability is off, and chi-squared of their quantiles, which
    should be uniform."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder(report), dtype=torch.float32)
    model.to(report.setup.device).eval()
    off = variance = 0.0
    quantiles, dice = [], np.random.default_rng(1)
    for new in turns:
        tokens = torch.tensor([prompt + new], device=report.setup.device)
        with torch.no_grad():
            logits = model(tokens).logits[0, len(prompt) - 1 : -1] / TEMPERATURE
        logs, drawn = logits.double().log_softmax(-1), tokens[0, len(prompt) :, None]
        chances, said = logs.exp(), logs.gather(-1, drawn)[:, 0]
        mean = (chances * logs).sum(-1)
        off += float((said - mean).sum())
        variance += float(((chances * logs**2).sum(-1) - mean**2).sum())
        below = chances.cumsum(-1).gather(-1, drawn)[:, 0] - said.exp()
        quantiles.append((below.cpu().numpy(), said.exp().cpu().numpy()))
    below, chance = (np.concatenate(part) for part in zip(*quantiles, strict=True))
    uniform = below + dice.random(len(below)) * chance
    counts = np.histogram(uniform, bins=BINS, range=(0, 1))[0]
    expected = len(uniform) / BINS
    return off / max(variance, 1e-12) ** 0.5, float(((counts - expected) ** 2 / expected).sum())
