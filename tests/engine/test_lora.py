"""vLLM's own LoRA under ROSE's versions: exact against PEFT, in place, only beside its own base."""

import asyncio
import time
from typing import get_args

import pytest
import torch

from rose.config import Lora, read_shape
from rose.config.trainer import FUSED, SLOT_RANKS
from rose.engine import layout
from rose.trainer import adapter
from rose.trainer.model import load
from rose.transfer import TransferError
from rose.transfer.live import Live
from rose.transfer.source import Folder
from rose.transfer.store import edge_name
from tests.engine import turns as turns_of
from tests.engine.turns import (
    DEADLINE_S,
    LONG,
    PROMPTS,
    generated,
    model_of,
    part_agrees,
    reference,
    scheduled_by,
    settings,
    trainers,
    turn,
    turns,
)
from tests.parts.relay.relays import TOKEN, Running
from tests.transfer.worlds import World

pytestmark = pytest.mark.slow
ALL = Lora(rank=4, alpha=6.0, targets=list(FUSED))  # 4: less than a slot has; 6/4: no power of two
SOME = Lora(rank=8, alpha=8.0, targets=["v_proj", "down_proj"])


def policy_of(folder, lora: Lora, seed: int):
    """A policy whose adapter says something."""
    torch.manual_seed(seed)
    policy = load(folder, torch.float32, False, lora=lora).eval()
    with torch.no_grad():
        for _, parameter in policy.named_weights():
            parameter.normal_(std=0.2)
    return policy


def published(policy) -> dict[str, torch.Tensor]:
    scales = adapter.scales(policy.lora, policy.named_weights())
    return {n: p.detach() * scales.get(n, 1.0) for n, p in policy.named_weights()}


def world_of(store, folder, policy) -> World:
    """Two trainer ranks with the policy's adapter."""
    shape = read_shape(folder)

    def cuts(name, extent):
        return layout.cuts(name, extent, shape, (1, 2))

    base = adapter.base_of(policy.base_weights(), lambda p: p.detach().clone(), torch.float32, cuts)
    weights = published(policy)
    at = {name: cuts(name, tuple(tensor.shape)) for name, tensor in weights.items()}
    return World(store, weights, at, largest=500, dtype=torch.float32, base=base)


def two_versions(store, folder):
    """(a world that has published versions 0 and 1, the policy of each)"""
    first, second = (policy_of(folder, ALL, seed) for seed in (1, 2))
    world = world_of(store, folder, first)
    world.publish(0)
    world.weights = published(second)
    world.publish(1)
    return world, first, second


def agrees(policy, results) -> None:
    turns_of.agrees(policy.hf, results, atol=1e-4)


def test_ranks_are_those_that_vllm_has():
    from vllm.config.lora import MaxLoRARanks

    assert get_args(MaxLoRARanks) == SLOT_RANKS


@pytest.mark.parametrize("architecture, lora", [("Qwen3", ALL), ("Qwen2", ALL), ("Llama", SOME)])
def test_logprobs_are_those_of_peft(start, wait, folders, tmp_path, architecture, lora):
    """Two tensor-parallel workers of the second take their parts, and both what they share."""
    folder = folders[architecture]
    workers = 1 + (architecture == "Qwen2")
    engine = start(architecture, lora=lora, tensor_parallel=workers)
    before = wait(engine.checksum())
    turns_of.agrees(model_of(folder), wait(turns(engine)), atol=1e-4)
    first, second = (policy_of(folder, lora, seed) for seed in (1, 2))
    world = world_of(tmp_path / "store", folder, first)
    world.publish(0)
    loaded = wait(engine.load_version(0, str(world.store), settings()))
    assert loaded.route == [edge_name(0, -1)], "from zeros, which the engine begins with"
    agrees(first, wait(turns(engine)))
    world.weights = published(second)
    world.publish(1)
    loaded = wait(engine.load_version(1, str(world.store), settings()))
    assert loaded.route == [edge_name(1, 0)]
    results = wait(turns(engine))  # the same prompts: caches are of version 0
    agrees(second, results)
    assert all(set(result["versions"]) == {1} for result in results)
    size = sum(p.numel() for _, p in second.named_weights())
    assert size <= loaded.changed <= workers * size, "an adapter, and no value of the base"
    wait(engine.deactivate())
    wait(engine.activate())
    assert wait(engine.checksum()) == before
    wait(engine.load_version(1, str(world.store), settings()))
    agrees(second, wait(turns(engine)))


@pytest.mark.parametrize("in_flight", ["recompute", "keep"])
def test_a_turn_in_flight_meets_a_new_adapter(start, wait, folders, tmp_path, in_flight):
    engine = start("Qwen3", engine_args=scheduled_by("TwicePatient"), lora=ALL)
    world, first, second = two_versions(tmp_path / "store", folders["Qwen3"])
    load = engine.load_version
    wait(load(0, str(world.store), settings()))

    async def flipped() -> dict:
        running = asyncio.ensure_future(turn(engine, "t", PROMPTS[0], LONG))
        await generated(engine, 1)
        await load(1, str(world.store), settings(in_flight=in_flight))
        return await running

    result = wait(asyncio.wait_for(flipped(), DEADLINE_S))
    versions, tokens = result["versions"], result["tokens"]
    assert versions == sorted(versions) and set(versions) == {0, 1}
    old = versions.count(0)
    part_agrees(first.hf, result, slice(0, old), PROMPTS[0], atol=1e-4)
    if in_flight == "recompute":
        part_agrees(second.hf, result, slice(old, None), PROMPTS[0], atol=1e-4)
    else:  # by the new adapter, on the old one's KV cache
        assert tokens[old:] != reference(first.hf, PROMPTS[0], tokens)[0][old:]
    after = wait(turn(engine, "after", PROMPTS[1]))
    assert after["tokens"] == reference(second.hf, PROMPTS[1], after["tokens"])[0]


def test_an_adapter_for_another_base_is_refused(start, wait, folders, tmp_path):
    engine = start("Qwen3", lora=ALL)
    load = engine.load_version
    other = model_of(folders["Qwen3"])
    with torch.no_grad():
        other.model.layers[1].mlp.up_proj.weight[3, 5] += 1e-3
    other.save_pretrained(tmp_path / "other")
    policy = policy_of(tmp_path / "other", ALL, 1)
    world = world_of(tmp_path / "store", tmp_path / "other", policy)
    world.publish(0)
    before = wait(engine.checksum())
    with pytest.raises(TransferError, match=r"another base model: 1 of \d+ .*1.mlp.up_proj.weight"):
        wait(engine.load_version(0, str(world.store), settings()))
    whole = trainers(tmp_path / "whole", folders["Qwen3"])
    whole.publish(0)
    with pytest.raises(TransferError, match="versions are whole models, and this .* with trainer"):
        wait(engine.load_version(0, str(whole.store), settings()))
    assert wait(engine.checksum()) == before and engine.version == -1
    mine, _, second = two_versions(tmp_path / "mine", folders["Qwen3"])
    token = tmp_path / "token"
    token.touch(0o600)
    token.write_text(TOKEN)
    relayed = settings(relay_token_file=str(token))
    relay = Running(Folder(mine.store), tmp_path / "cache")
    try:
        wait(load(0, relay.url, relayed))
        with pytest.raises(TransferError, match="another base model"):
            wait(load(0, str(world.store), settings()))
        assert engine.version == 0
        loaded = wait(load(1, relay.url, relayed))
    finally:
        relay.stop()
    assert loaded.route == [edge_name(1, 0)]
    agrees(second, wait(turns(engine)))


def test_the_base_is_compared_once_while_wanted(start, wait, folders, tmp_path, monkeypatch):
    began, go, view = tmp_path / "began", tmp_path / "go", Live.view

    def held(live, place):
        if "lora" not in place.parameter:
            with began.open("a") as file:
                file.write(f"{place.parameter}\n")
            while not go.exists():
                time.sleep(0.01)
        return view(live, place)

    monkeypatch.setattr(Live, "view", held)  # The engine is forked later and has it, too.
    engine = start("Qwen3", lora=ALL)
    load = engine.load_version
    policy = policy_of(folders["Qwen3"], ALL, 1)
    mine, again = (world_of(tmp_path / name, folders["Qwen3"], policy) for name in ("one", "two"))
    mine.publish(0)
    again.publish(0)
    blocks = len(mine.plan.base.blocks)

    def compared() -> int:
        return len(began.read_text().splitlines())

    async def cancelled() -> None:
        loading = asyncio.ensure_future(load(0, str(mine.store), settings()))
        while not began.exists():
            await asyncio.sleep(0.01)
        loading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await loading
        go.touch()
        await load(0, str(mine.store), settings())

    wait(asyncio.wait_for(cancelled(), DEADLINE_S))
    assert compared() == 1 + blocks, "the block at which it was cancelled, then all"
    wait(load(0, str(again.store), settings()))
    assert compared() == 1 + blocks
    wait(engine.deactivate())
    wait(engine.activate())
    wait(load(0, str(mine.store), settings()))
    assert compared() == 1 + 2 * blocks, "its memory was given back meanwhile"
