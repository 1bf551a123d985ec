"""The real vLLM, in its own process: right numbers, right weights, clean death."""

import asyncio
import math
import os
import signal
import time

import numpy as np
import pytest
import torch

from rose import protocol
from rose.engine import vllm_engine
from rose.engine.vllm_engine import EngineDied, EngineError
from rose.transfer import TransferError
from rose.transfer.store import FULL, edge_name
from tests import processes
from tests.engine import schedulers
from tests.engine.turns import (
    DEADLINE_S,
    GREEDY,
    LONG,
    PROMPTS,
    agrees,
    arrives_mid_turn,
    dies,
    generated,
    model_of,
    part_agrees,
    perturbed,
    publish,
    reference,
    scheduled_by,
    settings,
    trainers,
    turn,
    turns,
    weights_of,
)
from tests.transfer.worlds import World

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("architecture", ["Qwen3", "Qwen2", "Llama", "Qwen3Moe"])
def test_greedy_tokens_and_logprobs_are_transformers(warm, wait, folders, tmp_path, architecture):
    engine = warm(architecture)
    agrees(model_of(folders[architecture]), wait(turns(engine)))

    new = perturbed(folders[architecture])
    store = publish(tmp_path / "store", folders[architecture], 5, new)
    loaded = wait(engine.load_version(5, store, settings()))
    assert engine.version == 5 and loaded.pause_s > 0
    assert loaded.route == [edge_name(5, -1)]  # the trainer began with the engine's weights
    # same prompts: a stale prefix cache would show
    results = wait(turns(engine))
    agrees(new, results)
    assert all(set(result["versions"]) == {5} for result in results)


def test_the_logprobs_are_the_models_whatever_the_sampling(start, wait, folders):
    """Temperature, top-p and top-k change what is drawn, not the reported log-probability."""
    engine = start("Qwen3", engine_args={"enable_chunked_prefill": False})
    sampling = protocol.Sampling(max_new_tokens=24, temperature=0.7, top_p=0.9, top_k=20, seed=3)
    results = wait(turns(engine, sampling=sampling))
    agrees(model_of(folders["Qwen3"]), results, greedy=False)
    again = wait(turns(engine, sampling=sampling))
    assert [r["tokens"] for r in again] == [r["tokens"] for r in results]
    other = wait(turns(engine, sampling=protocol.Sampling(max_new_tokens=24, seed=4)))
    assert [r["tokens"] for r in other] != [r["tokens"] for r in results]
    assert any(r["cached"] > 0 for r in wait(turns(engine, [PROMPTS[0] * 8] * 2, tag="long")))


def test_the_logprobs_of_a_run_are_of_what_its_tokens_are_drawn_from(start, wait, folders):
    """At rollout.temperature and of the top_k that are left, also beside greedy turns."""
    engine = start("Qwen3", drawn={"temperature": 0.7, "top_k": 5})
    model = model_of(folders["Qwen3"])
    drawn = [protocol.Sampling(24, temperature=0.7, top_k=top_k) for top_k in (0, 5)]
    trained = [(prompt, sampling) for prompt in PROMPTS for sampling in drawn]
    asked = [*trained, *((prompt, GREEDY) for prompt in PROMPTS)]

    async def at_once():
        made = (turn(engine, f"t{i}", *each) for i, each in enumerate(asked))
        return await asyncio.gather(*made)

    found = wait(at_once())
    for (prompt, sampling), result in zip(trained, found, strict=False):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + result["tokens"]])).logits[0].float() / 0.7
        logits = logits[len(prompt) - 1 : -1]
        if sampling.top_k:
            least = logits.topk(sampling.top_k).values[:, -1:]
            logits = logits.masked_fill(logits < least, -math.inf)
        tokens = torch.tensor(result["tokens"])[:, None]
        expected = logits.log_softmax(-1).gather(1, tokens)[:, 0]
        np.testing.assert_allclose(result["logprobs"], expected, atol=1e-3)
    agrees(model, found[len(trained) :])


def test_turns_end_at_eos_at_the_limit_and_at_the_context(warm, wait, model_config):
    engine = warm("Qwen3")
    before = engine.stats().generated_tokens
    results = wait(turns(engine, PROMPTS * 4, protocol.Sampling(max_new_tokens=400)))
    for prompt, result in zip(PROMPTS * 4, results, strict=False):
        if result["finish"] is protocol.FinishReason.STOP:
            assert result["tokens"][-1] == 1 and 1 not in result["tokens"][:-1]
        else:
            assert result["finish"] is protocol.FinishReason.LENGTH
            assert len(prompt) + len(result["tokens"]) == model_config.max_context
    expected = {protocol.FinishReason.STOP, protocol.FinishReason.LENGTH}
    assert {r["finish"] for r in results} == expected
    chosen, *warnings = engine.description
    assert chosen.startswith("vLLM 0.") and "model runner V1; synchronous scheduling" in chosen
    assert "attention by CPU_ATTN; CUDA graphs NONE" in chosen and any(warnings)
    full = wait(turn(engine, "full", [5] * model_config.max_context))
    assert (full["tokens"], full["finish"]) == ([], protocol.FinishReason.LENGTH)
    stats = engine.stats()
    assert (stats.running, stats.waiting) == (0, 0) and engine.kv_tokens > 10_000
    assert stats.generated_tokens - before == sum(len(r["tokens"]) for r in results)


def test_an_aborted_turn_continues_from_its_partial_tokens_to_the_same_result(start, wait):
    engine = start("Qwen3", engine_args=scheduled_by("Holding"))
    prompt, sampling = PROMPTS[1], protocol.Sampling(max_new_tokens=100, temperature=0.0)

    async def aborted() -> dict:
        running = asyncio.ensure_future(turn(engine, "held", prompt, sampling))
        await generated(engine, len(whole) + 1)
        await engine.abort("held")
        return await running

    whole = wait(turn(engine, "whole", prompt, sampling))["tokens"]
    first = wait(aborted())
    part = first["tokens"]
    assert first["finish"] is protocol.FinishReason.ABORT and 0 < len(part) < len(whole)
    rest = protocol.Sampling(max_new_tokens=100 - len(part), temperature=0.0)
    assert part + wait(turn(engine, "b", prompt + part, rest))["tokens"] == whole


@pytest.mark.parametrize("in_flight", ["recompute", "keep"])
def test_given_back_and_flipped_turns_keep_their_tokens(start, wait, folders, tmp_path, in_flight):
    args = scheduled_by("PatientEvicting") | {"max_num_batched_tokens": 64}
    engine = start("Qwen3", engine_args=args)
    store = publish(tmp_path / "store", folders["Qwen3"], 1, perturbed(folders["Qwen3"]))

    async def scenario() -> list[dict]:
        both = (turn(engine, name, PROMPTS[2], LONG) for name in ("evict", "stays"))
        running = [asyncio.ensure_future(each) for each in both]
        await generated(engine, 20)
        await engine.load_version(1, store, settings(in_flight=in_flight))
        return await asyncio.gather(*running)

    evicted, stays = wait(asyncio.wait_for(scenario(), DEADLINE_S))
    assert evicted["finish"] is protocol.FinishReason.ABORT and set(evicted["versions"]) == {-1, 1}
    made = len(evicted["tokens"])
    assert made + len(PROMPTS[2]) == schedulers.AT_TOKENS
    cut = min(result["versions"].index(1) for result in (evicted, stays))
    assert stays["finish"] is not protocol.FinishReason.ABORT and len(stays["tokens"]) > made
    assert cut >= 8 and stays["tokens"][:cut] == evicted["tokens"][:cut]
    assert engine.stats().running == 0
    # before its first token
    at_once = wait(turn(engine, "evict", PROMPTS[2] * 4))
    assert (at_once["finish"], at_once["tokens"]) == (protocol.FinishReason.ABORT, [])


@pytest.mark.parametrize("in_flight", ["recompute", "keep", "finish"])
def test_a_version_that_arrives_mid_turn_splits_it(start, warm, wait, folders, tmp_path, in_flight):
    finish = in_flight == "finish"
    engine = warm("Qwen3") if finish else start("Qwen3", engine_args=scheduled_by("Patient"))
    old, new = model_of(folders["Qwen3"]), perturbed(folders["Qwen3"])
    store = publish(tmp_path / "store", folders["Qwen3"], 1, new)
    result, late = wait(asyncio.wait_for(arrives_mid_turn(engine, store, in_flight), DEADLINE_S))
    cut = len(result["versions"]) if finish else result["versions"].index(1)
    assert set(result["versions"][:cut]) == {-1} and set(result["versions"][cut:]) <= {1}
    assert cut >= 20
    assert set(late["versions"]) == {1}
    agrees(new, [late], [PROMPTS[3]])
    for model, part in ((old, slice(0, cut)), (new, slice(cut, None))):
        if model is old or in_flight != "keep":  # such a request's KV cache is the old weights'
            part_agrees(model, result, part, PROMPTS[2])
    if in_flight == "keep":
        # the new weights did make them
        assert cut < len(result["tokens"])
        assert result["tokens"][cut:] != reference(old, PROMPTS[2], result["tokens"])[0][cut:]


@pytest.mark.parametrize("architecture", ["Qwen2", "Llama"])
def test_sparse_versions_are_as_the_last_one(start, warm, wait, folders, tmp_path, architecture):
    engine, folder = warm(architecture), folders[architecture]
    world = trainers(tmp_path / "store", folder, full_every=10)
    routes = []
    for version in range(24):
        world.step(share=0.02)
        world.publish(version)
        world.tidy()
        routes += wait(engine.load_version(version, str(world.store), settings())).route
    assert routes == [edge_name(version, version - 1) for version in range(24)]
    trained = model_of(folder)
    with torch.no_grad():
        for name, parameter in trained.named_parameters():
            parameter.copy_(world.weights[name])
    trained.save_pretrained(tmp_path / "trained")
    folders["trained"] = tmp_path / "trained"
    fresh = start("trained")
    assert wait(engine.checksum()) == wait(fresh.checksum())
    of_both = [wait(turn(e, "t", PROMPTS[0])) for e in (engine, fresh)]
    for what in ("tokens", "logprobs"):
        assert of_both[0][what] == of_both[1][what]


PARTS = {
    "Qwen2": {},  # biases and a head of its own
    "Llama": {},  # tied embeddings
    "Qwen3Moe": {"enable_expert_parallel": True},  # two experts each; the rest split
}


@pytest.mark.parametrize("architecture, engine_args", PARTS.items())
def test_tensor_parallel_parts_arrive(start, wait, folders, tmp_path, architecture, engine_args):
    engine = start(architecture, engine_args, tensor_parallel=2)
    folder = folders[architecture]
    world, new = trainers(tmp_path / "store", folder), perturbed(folder)
    world.step(share=0.05)
    world.publish(1)
    wait(engine.load_version(1, str(world.store), settings()))
    world.weights = weights_of(new)
    world.publish(2)
    loaded = wait(engine.load_version(2, str(world.store), settings()))
    assert loaded.route == [edge_name(2, 1)]
    agrees(new, wait(turns(engine)))


BROKEN = {"every byte": "can't be reached", "missing tensor": "fill 0 of"}
BROKEN |= {"wrong shape": "config says"}


@pytest.mark.parametrize("break_it, says", BROKEN.items())
def test_a_bad_version_leaves_the_old_one_serving(warm, wait, folders, tmp_path, break_it, says):
    engine, folder = warm("Qwen3"), folders["Qwen3"]
    before = wait(engine.checksum())
    weights = weights_of(perturbed(folder))
    if break_it == "missing tensor":
        del weights["model.norm.weight"]
    if break_it == "wrong shape":
        weights["model.embed_tokens.weight"] = torch.zeros(264, 64)
    world = World(tmp_path / "store", weights, {})
    world.publish(1)
    if break_it == "every byte":
        for base in (-1, FULL):
            path = world.store / edge_name(1, base) / "rank-00000.h5"
            path.write_bytes(bytes(byte ^ 4 for byte in path.read_bytes()))
    with pytest.raises(TransferError, match=says):
        wait(engine.load_version(1, str(world.store), settings()))
    assert engine.version == -1 and wait(engine.checksum()) == before
    agrees(model_of(folder), wait(turns(engine)))


def test_the_next_version_comes_after_a_cancelled_load(start, wait, folders, tmp_path, monkeypatch):
    from rose.transfer.receive import Receiver

    stage = Receiver.stage

    def held(self, have, want, *args):
        staged = stage(self, have, want, *args)
        if want == 1:
            (tmp_path / "staged").touch()
            while not (tmp_path / "go").exists():
                time.sleep(0.01)
        return staged

    monkeypatch.setattr(Receiver, "stage", held)  # before the fork: the engine has it too
    engine, folder = start("Qwen3"), folders["Qwen3"]
    world, new = trainers(tmp_path / "store", folder), perturbed(folder)
    world.step(share=0.05)
    world.publish(1)
    world.weights = weights_of(new)
    world.publish(2)

    async def scene():
        first = asyncio.ensure_future(engine.load_version(1, str(world.store), settings()))
        while not (tmp_path / "staged").exists():
            await asyncio.sleep(0.01)
        first.cancel()
        second = asyncio.ensure_future(engine.load_version(2, str(world.store), settings()))
        with pytest.raises(asyncio.CancelledError):
            await first
        assert not second.done() and engine.version == -1
        (tmp_path / "go").touch()
        return await second

    wait(asyncio.wait_for(scene(), DEADLINE_S))
    assert engine.version == 2
    agrees(new, wait(turns(engine)))


def test_an_engine_that_can_not_take_a_flip_back_ends(start, wait, folders, tmp_path, monkeypatch):
    from rose.transfer.live import Live

    def broken(self, place, values):
        raise RuntimeError("device lost")

    monkeypatch.setattr(Live, "write", broken)  # before the fork: the engine has it too
    engine = start("Qwen3")
    store = publish(tmp_path / "store", folders["Qwen3"], 1, perturbed(folders["Qwen3"]))
    with pytest.raises(EngineDied):
        wait(engine.load_version(1, store, settings()))
    dies(wait, engine)


def test_a_dead_engine_is_noticed_and_one_that_hangs_is_ended(start, wait, monkeypatch):
    # The scheduler stops at a turn of 80 tokens until new weights arrive. None arrive here, so the
    # turns never end.
    engine = start("Qwen3", engine_args=scheduled_by("Patient"))

    async def scenario() -> None:
        long = protocol.Sampling(max_new_tokens=200)
        running = asyncio.ensure_future(turns(engine, PROMPTS, long))
        await generated(engine, 20)
        os.kill(engine.pid, signal.SIGKILL)
        with pytest.raises(EngineDied):
            await running

    engine._turn_timeout_s = 10 * DEADLINE_S  # nothing is noticed by that
    wait(asyncio.wait_for(scenario(), DEADLINE_S))
    assert not engine.alive
    with pytest.raises(EngineDied):
        wait(turn(engine, "late", PROMPTS[0]))
    wait(engine.shutdown())
    again = start("Qwen3")
    assert wait(turn(again, "t", PROMPTS[0]))["tokens"]
    monkeypatch.setattr(vllm_engine, "RPC_TIMEOUT_S", 1.0)
    os.kill(again.pid, signal.SIGSTOP)
    with pytest.raises(EngineDied, match="did not answer within 1 s"):
        wait(again.checksum())
    dies(wait, again)


def test_a_seeded_turn_that_would_kill_the_engine_is_refused(warm, wait):
    engine = warm("Qwen3")
    with pytest.raises(EngineError, match="deterministic=true"):
        wait(turn(engine, "t", PROMPTS[0], protocol.Sampling(max_new_tokens=8, seed=5)))
    assert wait(turn(engine, "t", PROMPTS[0]))["tokens"]


def test_engines_with_different_seeds_draw_differently(start, wait):
    sampling, engines = (
        protocol.Sampling(max_new_tokens=24),
        [start("Qwen3", seed=s) for s in (1, 2)],
    )
    first, second = (wait(turn(engine, "t", PROMPTS[0], sampling)) for engine in engines)
    assert first["tokens"] != second["tokens"]


def test_deterministic_turns_do_not_depend_on_their_company(start, wait):
    engine = start("Qwen3", deterministic=True)
    sampling = protocol.Sampling(max_new_tokens=24, seed=5)
    together = wait(turns(engine, sampling=sampling))
    alone = [wait(turn(engine, f"t{i}", p, sampling)) for i, p in enumerate(PROMPTS)]
    expected = [(r["tokens"], r["logprobs"]) for r in alone]
    assert [(r["tokens"], r["logprobs"]) for r in together] == expected


def descendants() -> set:
    """Processes below this one, without that which keeps an account of shared memory."""
    found = processes.children(recursive=True)
    return {each for each in found if "resource_tracker" not in str(processes.words(each))}


def test_unservable_models_leave_nothing(wait, folders, rollout, model_config, tmp_path):
    for name in ("config.json", "generation_config.json"):
        (tmp_path / name).write_bytes((folders["Qwen3"] / name).read_bytes())  # and no weights
    before = descendants()
    with pytest.raises(EngineError):
        wait(vllm_engine.Engine.start(tmp_path, rollout, model_config))
    assert not descendants() - before


def test_a_start_broken_off_leaves_nothing(warm, wait, folders, rollout, model_config, monkeypatch):
    """Neither one that was not there yet: a trainer takes the device as soon as it hears of it."""
    warm("Qwen3")  # what is imported needs no process
    begun, before = [], descendants()
    build = vllm_engine.build
    monkeypatch.setattr(vllm_engine, "build", lambda *args: (begun.append(True), build(*args))[1])

    async def scenario() -> set:
        start = vllm_engine.Engine.start(folders["Qwen3"], rollout, model_config)
        starting = asyncio.create_task(start)
        while not begun:
            await asyncio.sleep(0.001)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        return descendants() - before

    assert not wait(asyncio.wait_for(scenario(), DEADLINE_S))
