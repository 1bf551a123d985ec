"""An engine that drafts from its groups' text samples as one without drafts does, in fewer steps."""

import asyncio

import msgspec
import numpy as np
import pytest
from transformers import AutoModelForCausalLM

from rose import protocol
from rose.config import Draft
from rose.engine import vllm_engine
from rose.engine.vllm_engine import Engine
from tests.engine import test_vllm_engine as plain
from tests.engine.test_drafts import PROMPT, SAMPLINGS, WORST_P, check_drafts, p_value, samples
from tests.engine.test_vllm_engine import PROMPTS, reference, turn

pytestmark = pytest.mark.slow
ALONE = 64
LEARN = "rose_learn_siblings"


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_sampled_tokens_have_the_models_distribution(wait, folder, engine_with, sampling):
    check_drafts(wait, folder, engine_with("group"), sampling)


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
    wait(engine.call_workers(LEARN, [("g5.0.t0", 0, before, packed)], []))
    tokens, fed = steps_of(wait, engine, "g5.1.t0#1")
    assert tokens == wanted and fed < alone / 3
    wait(engine.call_workers(LEARN, [], ["g5"]))
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
        new = plain.perturbed(folder)
        store = plain.publish(tmp_path / "store", folder, 1, new)
        meeting = plain.arrives_mid_turn(engine, store, in_flight)
        found, late = wait(asyncio.wait_for(meeting, plain.DEADLINE_S))
        assert engine.stats().accepted > 0
    finally:
        wait(engine.shutdown())
    cut = found["versions"].index(1)
    assert set(found["versions"][:cut]) == {-1} and set(found["versions"][cut:]) == {1}
    plain.agrees(new, [late], [PROMPTS[3]])
    for model, part in ((old, slice(0, cut)), (new, slice(cut, None))):
        if model is new and in_flight == "keep":  # the KV cache of the old weights
            continue
        tokens, logprobs = reference(model, PROMPTS[2], found["tokens"])
        assert found["tokens"][part] == tokens[part]
        np.testing.assert_allclose(found["logprobs"][part], logprobs[part], atol=1e-3)
