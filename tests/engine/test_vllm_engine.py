"""The real vLLM, in its own process: right numbers, right weights, clean death."""

import asyncio
import os
import signal
import time

import numpy as np
import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

from rose import protocol
from rose.engine.vllm_engine import EngineDied, EngineError
from rose.transfer import TransferError, VersionWriter, commit, prepare

pytestmark = pytest.mark.slow
PROMPTS = [np.random.default_rng(i).integers(2, 263, size=20 + 7 * i).tolist() for i in range(6)]
GREEDY = protocol.Sampling(max_new_tokens=24, temperature=0.0)


async def turn(engine, name: str, prompt: list[int], sampling=GREEDY) -> dict:
    tokens, logprobs, versions = [], [], []
    async for chunk in engine.generate(name, protocol.pack_tokens(prompt), sampling):
        tokens += chunk.tokens
        logprobs += chunk.logprobs
        versions += [chunk.version] * len(chunk.tokens)
    assert len(tokens) == len(logprobs)
    return dict(tokens=tokens, logprobs=logprobs, versions=versions, finish=chunk.finish, cached=chunk.cached_tokens)


async def turns(engine, prompts=PROMPTS, sampling=GREEDY, tag: str = "t") -> list[dict]:
    return await asyncio.gather(*(turn(engine, f"{tag}{i}", p, sampling) for i, p in enumerate(prompts)))


@torch.no_grad()
def reference(model, prompt: list[int], tokens: list[int]) -> tuple[list[int], list[float]]:
    """Greedy choice and log-probability of each of `tokens` by transformers."""
    logprobs = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1:-1].float().log_softmax(-1)
    return logprobs.argmax(-1).tolist(), logprobs.gather(1, torch.tensor(tokens)[:, None])[:, 0].tolist()


def publish(folder, version: int, model, world: int = 2):
    prepare(folder, version)
    tensors = list(model.state_dict().items())
    for rank in range(world):
        writer = VersionWriter(folder, version, rank, world)
        for name, tensor in tensors[rank::world]:
            writer.add(name, tensor)
        writer.finish()
    return str(commit(folder, version, world))


def perturbed(folder):
    model = AutoModelForCausalLM.from_pretrained(folder).float().eval()
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator))
    return model


def agrees(model, results, prompts=PROMPTS) -> None:
    for prompt, result in zip(prompts, results, strict=True):
        tokens, logprobs = reference(model, prompt, result["tokens"])
        assert result["tokens"] == tokens
        np.testing.assert_allclose(result["logprobs"], logprobs, atol=1e-3)


@pytest.mark.parametrize("architecture", ["Qwen3", "Qwen2", "Llama"])
def test_greedy_tokens_and_logprobs_are_those_of_transformers_before_and_after_a_new_version(
        start, loop, folders, tmp_path, architecture):
    engine = start(architecture)
    old = AutoModelForCausalLM.from_pretrained(folders[architecture]).float().eval()
    agrees(old, loop.run_until_complete(turns(engine)))

    new = perturbed(folders[architecture])
    loaded = loop.run_until_complete(engine.load_version(publish(tmp_path, 5, new)))
    assert loaded.version == engine.version == 5 and loaded.pause_s < 5
    results = loop.run_until_complete(turns(engine))  # same prompts: a stale prefix cache would show
    agrees(new, results)
    assert all(set(result["versions"]) == {5} for result in results)


def test_the_logprobs_are_the_models_whatever_the_sampling(start, loop, folders):
    """Temperature, top-p and top-k change what is drawn, not the reported log-probability."""
    engine = start("Qwen3", engine_args={"enable_chunked_prefill": False})
    model = AutoModelForCausalLM.from_pretrained(folders["Qwen3"]).float().eval()
    sampling = protocol.Sampling(max_new_tokens=24, temperature=0.7, top_p=0.9, top_k=20, seed=3)
    results = loop.run_until_complete(turns(engine, sampling=sampling))
    for prompt, result in zip(PROMPTS, results):
        np.testing.assert_allclose(result["logprobs"], reference(model, prompt, result["tokens"])[1], atol=1e-3)
    again = loop.run_until_complete(turns(engine, sampling=sampling))
    assert [r["tokens"] for r in again] == [r["tokens"] for r in results]
    other = loop.run_until_complete(turns(engine, sampling=protocol.Sampling(max_new_tokens=24, seed=4)))
    assert [r["tokens"] for r in other] != [r["tokens"] for r in results]
    assert any(r["cached"] > 0 for r in loop.run_until_complete(turns(engine, [PROMPTS[0] * 8] * 2, tag="long")))


def test_turns_end_at_eos_at_the_limit_and_at_the_context(start, loop, model_config):
    engine = start("Qwen3")
    results = loop.run_until_complete(turns(engine, PROMPTS * 4, protocol.Sampling(max_new_tokens=400)))
    for prompt, result in zip(PROMPTS * 4, results):
        if result["finish"] is protocol.FinishReason.STOP:
            assert result["tokens"][-1] == 1 and 1 not in result["tokens"][:-1]
        else:
            assert result["finish"] is protocol.FinishReason.LENGTH
            assert len(prompt) + len(result["tokens"]) == model_config.max_context
    assert {r["finish"] for r in results} == {protocol.FinishReason.STOP, protocol.FinishReason.LENGTH}
    full = loop.run_until_complete(turn(engine, "full", [5] * model_config.max_context))
    assert (full["tokens"], full["finish"]) == ([], protocol.FinishReason.LENGTH)
    stats = engine.stats()
    assert (stats.running, stats.waiting) == (0, 0) and engine.kv_tokens > 10_000
    assert stats.generated_tokens == sum(len(r["tokens"]) for r in results)


def test_an_aborted_turn_continues_from_its_partial_tokens_to_the_same_result(start, loop):
    engine = start("Qwen3")
    prompt, sampling = PROMPTS[1], protocol.Sampling(max_new_tokens=60, temperature=0.0)

    async def first_part() -> list[int]:
        tokens = []
        async for chunk in engine.generate("a", protocol.pack_tokens(prompt), sampling):
            if not tokens:
                await engine.abort("a")
            tokens += chunk.tokens
        assert chunk.finish is protocol.FinishReason.ABORT
        return tokens

    whole = loop.run_until_complete(turn(engine, "whole", prompt, sampling))["tokens"]
    part = loop.run_until_complete(first_part())
    assert 0 < len(part) < len(whole)
    rest = protocol.Sampling(max_new_tokens=60 - len(part), temperature=0.0)
    assert part + loop.run_until_complete(turn(engine, "b", prompt + part, rest))["tokens"] == whole


def test_a_version_that_arrives_mid_turn_splits_the_turn_at_a_token(start, loop, folders, tmp_path):
    engine = start("Qwen3")
    old, new = AutoModelForCausalLM.from_pretrained(folders["Qwen3"]).float().eval(), perturbed(folders["Qwen3"])
    manifest = publish(tmp_path, 1, new)
    prompt, sampling = PROMPTS[2], protocol.Sampling(max_new_tokens=200, temperature=0.0)

    async def scenario() -> dict:
        running = asyncio.ensure_future(turn(engine, "t", prompt, sampling))
        while engine.stats().generated_tokens < 20:
            await asyncio.sleep(0.005)
        await engine.load_version(manifest)
        return await running

    result = loop.run_until_complete(asyncio.wait_for(scenario(), 60))
    cut = result["versions"].index(1)
    assert set(result["versions"][:cut]) == {-1} and set(result["versions"][cut:]) == {1} and cut >= 20
    for model, part in ((old, slice(0, cut)), (new, slice(cut, None))):
        tokens, logprobs = reference(model, prompt, result["tokens"])
        assert result["tokens"][part] == tokens[part]
        np.testing.assert_allclose(result["logprobs"][part], logprobs[part], atol=1e-3)


@pytest.mark.parametrize("break_it, says", [
    ("flip", "corrupted"), ("missing tensor", "fills 0 of"), ("wrong shape", "config says")])
def test_a_bad_version_leaves_the_old_weights_serving(start, loop, folders, tmp_path, break_it, says):
    engine = start("Qwen3")
    before = loop.run_until_complete(engine.checksum())
    model = perturbed(folders["Qwen3"])
    tensors = dict(model.state_dict())
    if break_it == "missing tensor":
        del tensors["model.norm.weight"]
    if break_it == "wrong shape":
        tensors["model.embed_tokens.weight"] = torch.zeros(264, 64)
    prepare(tmp_path, 1)
    writer = VersionWriter(tmp_path, 1, 0, 1)
    for name, tensor in tensors.items():
        writer.add(name, tensor)
    path = writer.finish()
    manifest = commit(tmp_path, 1, 1)
    if break_it == "flip":
        data = bytearray(path.read_bytes())
        data[bytes(data).index(model.model.norm.weight.detach().numpy().tobytes()) + 3] ^= 4
        path.write_bytes(data)
    with pytest.raises(TransferError, match=says):
        loop.run_until_complete(engine.load_version(str(manifest)))
    assert engine.version == -1 and loop.run_until_complete(engine.checksum()) == before
    old = AutoModelForCausalLM.from_pretrained(folders["Qwen3"]).float().eval()
    agrees(old, loop.run_until_complete(turns(engine)))


def test_a_killed_engine_is_noticed_at_once_and_a_new_one_starts(start, loop):
    engine = start("Qwen3")

    async def scenario() -> float:
        running = asyncio.ensure_future(turns(engine, PROMPTS, protocol.Sampling(max_new_tokens=200)))
        while engine.stats().generated_tokens < 20:
            await asyncio.sleep(0.005)
        killed = time.monotonic()
        os.kill(engine.pid, signal.SIGKILL)
        with pytest.raises(EngineDied):
            await running
        return time.monotonic() - killed

    assert loop.run_until_complete(asyncio.wait_for(scenario(), 30)) < 3
    assert not engine.alive
    with pytest.raises(EngineDied):
        loop.run_until_complete(turn(engine, "late", PROMPTS[0]))
    loop.run_until_complete(engine.shutdown())
    again = start("Qwen3")
    assert loop.run_until_complete(turn(again, "t", PROMPTS[0]))["tokens"]


def test_a_seeded_turn_that_would_kill_the_engine_is_refused(start, loop):
    engine = start("Qwen3")
    with pytest.raises(EngineError, match="deterministic=true"):
        loop.run_until_complete(turn(engine, "t", PROMPTS[0], protocol.Sampling(max_new_tokens=8, seed=5)))
    assert loop.run_until_complete(turn(engine, "t", PROMPTS[0]))["tokens"]


def test_engines_with_different_seeds_draw_differently(start, loop):
    sampling = protocol.Sampling(max_new_tokens=24)
    first, second = (loop.run_until_complete(turn(start("Qwen3", seed=seed), "t", PROMPTS[0], sampling)) for seed in (1, 2))
    assert first["tokens"] != second["tokens"]


def test_deterministic_turns_do_not_depend_on_their_company(start, loop):
    engine = start("Qwen3", deterministic=True)
    sampling = protocol.Sampling(max_new_tokens=24, seed=5)
    together = loop.run_until_complete(turns(engine, sampling=sampling))
    alone = [loop.run_until_complete(turn(engine, f"t{i}", p, sampling)) for i, p in enumerate(PROMPTS)]
    assert [(r["tokens"], r["logprobs"]) for r in together] == [(r["tokens"], r["logprobs"]) for r in alone]


def test_a_model_that_cannot_be_served_leaves_no_process(loop, folders, rollout, model_config, tmp_path):
    from rose.engine.vllm_engine import Engine

    for name in ("config.json", "generation_config.json"):
        (tmp_path / name).write_bytes((folders["Qwen3"] / name).read_bytes())  # and no weights
    before = set(psutil.Process().children(recursive=True))
    with pytest.raises(EngineError):
        loop.run_until_complete(Engine.start(tmp_path, rollout, model_config))
    left = set(psutil.Process().children(recursive=True)) - before
    assert [p for p in left if "resource_tracker" not in str(p.cmdline())] == []
