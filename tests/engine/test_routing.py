"""The experts that an engine on a CPU says its tokens went to, against transformers' routers."""

import asyncio
from collections import Counter

import numpy as np
import pytest
import torch

from rose import protocol
from rose.trainer.importance import mismatch
from rose.trainer.model import load
from tests.engine.conftest import make_model
from tests.engine.turns import (
    DEADLINE_S,
    LONG,
    PROMPTS,
    generated,
    model_of,
    perturbed,
    publish,
    scheduled_by,
    settings,
)
from tests.trainer.test_router_replay import chosen_by

pytestmark = pytest.mark.slow

# Greedy: what is sampled might meet a router's near tie, which rounding decides.
SAMPLING = protocol.Sampling(max_new_tokens=40, temperature=0.0)
LAYERS, TOP_K = 2, 2
# 24 tokens a step, and memory for three of the turns: prompts come in parts, and turns are preempted
ARGS = {"max_num_batched_tokens": 24, "max_num_seqs": 8, "num_gpu_blocks_override": 10}
ARGS |= {"block_size": 32}


@pytest.fixture(scope="module")
def engine(wait, start_one):
    engine = start_one("Qwen3Moe", engine_args=ARGS, routing=True)
    yield engine
    wait(engine.shutdown())


@pytest.fixture(scope="module")
def model(folders):
    return model_of(folders["Qwen3Moe"])


async def turn(engine, name: str, prompt: list[int], routed: int = 0, sampling=SAMPLING):
    """(all tokens, their experts from `routed` on, log-probabilities, finish)"""
    tokens, rows, logprobs, finish = list(prompt), b"", [], None
    async for chunk in engine.generate(name, protocol.pack_tokens(prompt), sampling, routed):
        tokens, rows = tokens + chunk.tokens, rows + chunk.experts
        logprobs, finish = logprobs + chunk.logprobs, chunk.finish
    return tokens, np.frombuffer(rows, np.uint8), logprobs, finish


def same(model, tokens: list[int], rows: np.ndarray, routed: int = 0) -> None:
    """Sets are compared: vLLM's CPU router does not sort them."""
    expected = np.sort(chosen_by(model, tokens)[routed:-1], axis=-1)
    assert np.array_equal(np.sort(rows.reshape(-1, LAYERS, TOP_K), axis=-1), expected)


def test_every_token_but_the_last_comes_with_its_experts(engine, wait, model):
    """Prompts of several chunks, the same ones again from the prefix cache, turns preempted."""

    async def all_of(tag: str):
        made = (turn(engine, f"{tag}{i}", prompt) for i, prompt in enumerate(PROMPTS))
        return await asyncio.gather(*made)

    for tag in ("new", "cached"):
        for tokens, rows, logprobs, _ in wait(all_of(tag)):
            same(model, tokens, rows)
            with torch.no_grad():
                whole = model(torch.tensor([tokens])).logits[0].log_softmax(-1)
            made = len(logprobs)
            expected = whole[-made - 1 : -1].gather(1, torch.tensor(tokens[-made:])[:, None])[:, 0]
            np.testing.assert_allclose(logprobs, expected.numpy(), atol=1e-4)
    assert engine.stats().cached_tokens > 0


def test_the_next_turn_brings_what_the_last_one_lacks(engine, wait, model):
    tokens, rows, _, _ = wait(turn(engine, "t0", PROMPTS[2]))
    same(model, tokens, rows)
    more, rest, _, _ = wait(turn(engine, "t1", [*tokens, 5, 6, 7], routed=len(tokens) - 1))
    same(model, more, rest, len(tokens) - 1)


def test_aborted_turns_and_those_of_new_weights_have_theirs(start, wait, model, folders, tmp_path):
    """With `in_flight=recompute`: what the old weights made keeps its experts."""
    engine = start("Qwen3Moe", engine_args=ARGS | scheduled_by("Holding"), routing=True)
    new = perturbed(folders["Qwen3Moe"])
    store = publish(tmp_path / "store", folders["Qwen3Moe"], 3, new)

    async def interrupted():
        running = asyncio.create_task(turn(engine, "held", PROMPTS[0], sampling=LONG))
        await generated(engine, 5)
        await engine.load_version(3, store, settings())
        at = engine.stats().generated_tokens
        while engine.stats().generated_tokens < at + 5:
            assert not running.done(), "a turn too short to meet new weights"
            await asyncio.sleep(0.005)
        await engine.abort("held")
        return await running

    tokens, rows, _, finish = wait(asyncio.wait_for(interrupted(), DEADLINE_S))
    rows = rows.reshape(-1, LAYERS, TOP_K)
    assert finish is protocol.FinishReason.ABORT and len(rows) == len(tokens) - 1
    old, now = (np.sort(chosen_by(m, tokens)[:-1], axis=-1) for m in (model, new))
    rows, prompt = np.sort(rows, axis=-1), len(PROMPTS[0])
    assert np.array_equal(rows[: prompt + 3], old[: prompt + 3])
    assert not np.array_equal(rows, old) and (rows[-3:] == now[-3:]).mean() > 0.9


def test_in_bfloat16_replay_closes_most_of_the_gap_to_the_trainer(start, wait, folders, tmp_path):
    """`pytest -s` prints the figures of docs/transfer.md."""
    wide = {"num_hidden_layers": 4, "num_experts": 32, "num_experts_per_tok": 4}
    model = make_model("Qwen3Moe", moe_intermediate_size=64, **wide)
    folders["wide"] = tmp_path / "wide"
    model.to(torch.bfloat16).save_pretrained(folders["wide"])
    engine = start("wide", engine_args={"dtype": "bfloat16"}, routing=True)

    async def all_of():
        prompts = [np.random.default_rng(i).integers(2, 263, 20 + i).tolist() for i in range(32)]
        sampling = protocol.Sampling(max_new_tokens=100)
        made = (turn(engine, f"t{i}", prompt, 0, sampling) for i, prompt in enumerate(prompts))
        return await asyncio.gather(*made)

    made, found = wait(all_of()), {}
    for replay in (False, True):
        policy = load(folders["wide"], torch.bfloat16, False, router_replay=replay)
        found[replay] = sums = Counter()
        for tokens, rows, logprobs, _ in made:
            whole, count = torch.tensor([tokens]), len(logprobs)
            mask, behaviour = torch.zeros(2, 1, len(tokens) - 1)
            mask[0, -count:], behaviour[0, -count:] = 1, torch.tensor(logprobs)
            experts = torch.tensor(rows.reshape(1, -1, 4, 4)) if replay else None
            with torch.no_grad():
                given = policy(whole[:, :-1], whole[:, 1:], mask, None, experts)[0]
            gap = mismatch(given, behaviour, mask)
            sums.update({name: gap[name].item() for name in ("kl_k3", "abs_diff")}, tokens=count)
            if replay:
                sums["differs"] += policy.replay.differs.item()
    for replay, sums in found.items():
        shares = {name: value / sums["tokens"] for name, value in sums.items()}
        print(f"router_replay={replay}: {sums['tokens']} tokens, {shares}")
    assert found[True]["kl_k3"] < found[False]["kl_k3"] / 4
    assert 0 < found[True]["differs"] < 0.1 * found[True]["tokens"]
