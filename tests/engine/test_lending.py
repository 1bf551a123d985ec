"""An engine whose memory goes back to the system, by block and as a whole, and that is right again
afterwards."""

import asyncio

import msgspec
import numpy as np
import pytest
import yaml
from transformers import AutoModelForCausalLM

from rose import protocol
from rose.config.serving import Serving
from rose.engine.vllm_engine import EngineDied, EngineError
from rose.memory import resident_bytes
from rose.parts.lending import board
from rose.parts.lending.rules import gate
from rose.parts.lending.vllm import device
from tests.engine.test_vllm_engine import (
    CONF,
    DEADLINE_S,
    PROMPTS,
    agrees,
    perturbed,
    publish,
    reference,
    settings,
    turn,
    turns,
)

pytestmark = pytest.mark.slow
MiB = 2**20


def worker(engine, wait, method: str, *args):
    """A call into the engine's one worker, as its scheduler makes."""
    return wait(engine._llm.collective_rpc(method, args=args))[0]


def tokens(results) -> list[list[int]]:
    return [r["tokens"] for r in results]


def same(results, expected) -> bool:
    """Tokens; log-probabilities but for the rounding that a batch's composition brings."""
    return tokens(results) == tokens(expected) and all(
        np.allclose(r["logprobs"], e["logprobs"], atol=1e-4)
        for r, e in zip(results, expected, strict=False)
    )


@pytest.mark.parametrize("architecture", ["Qwen2", "Llama"])  # a head of its own; tied embeddings
def test_an_inactive_engine_is_small_and_wakes_up(start, wait, folders, tmp_path, architecture):
    engine = start(architecture)
    before = wait(engine.checksum())
    made = wait(turns(engine))
    full = resident_bytes(engine.pid)
    # deactivated with the folder's own weights, and with a trained version
    for version in (1, None):
        wait(engine.deactivate())
        wait(engine.deactivate())
        assert not engine.active
        for call in (
            turn(engine, "late", PROMPTS[0]),
            engine.load_version(1, "nowhere", settings()),
            engine.checksum(),
        ):
            with pytest.raises(EngineError, match="inactive"):
                wait(call)
        if version is not None:  # before other work has let the heap grow
            # its KV cache is 256 MiB, its model less than one
            assert full - resident_bytes(engine.pid) > 200 * MiB
        wait(engine.activate())
        assert engine.active and engine.version == -1
        assert wait(engine.checksum()) == before
        again = wait(turns(engine))
        assert same(again, made) and {v for r in again for v in r["versions"]} == {-1}
        if version is not None:
            store = publish(
                tmp_path / "store", folders[architecture], version, perturbed(folders[architecture])
            )
            wait(engine.load_version(version, store, settings()))
            changed = wait(turns(engine))
            assert tokens(changed) != tokens(made)
            assert {v for r in changed for v in r["versions"]} == {version}
            assert wait(engine.checksum()) != before


async def sleeps_mid_turn(engine, store: str, pid: int) -> tuple[dict, dict, int, int]:
    """(a turn during which the engine sleeps and gets version 1, one that is asked for meanwhile,
    resident bytes before and in its sleep)."""
    before, sampling = (
        engine.stats().generated_tokens,
        protocol.Sampling(max_new_tokens=200, temperature=0.0),
    )
    running = asyncio.ensure_future(turn(engine, "t", PROMPTS[2], sampling))
    while engine.stats().generated_tokens < before + 20:
        await asyncio.sleep(0.005)
    full = resident_bytes(pid)
    moved = await engine.sleep()
    small = resident_bytes(pid)
    assert moved.gib * 2**30 > 0.5 * (full - small) and moved.total_gib > moved.free_gib > 0
    await engine.sleep()  # asked again, as after an order that broke off
    for call in (engine.load_version(1, store, settings()), engine.checksum(), engine.wake()):
        with pytest.raises(EngineError, match="wake_weights"):
            await call
    late = asyncio.ensure_future(turn(engine, "late", PROMPTS[3]))
    await engine.wake_weights()
    await engine.load_version(1, store, settings())
    assert not running.done() and not late.done() and not engine.open, "it has no KV cache yet"
    await engine.wake()
    return await running, await late, full, small


def test_an_engine_that_slept_goes_on_with_the_newest_weights(start, wait, folders, tmp_path):
    engine = start(
        "Qwen3", engine_args={"scheduler_cls": "tests.engine.schedulers.PatientScheduler"}
    )
    folder, new = folders["Qwen3"], perturbed(folders["Qwen3"])
    store = publish(tmp_path / "store", folder, 1, new)
    wait(turns(engine, PROMPTS[:4]))  # fills some of the cache
    result, late, full, small = wait(
        asyncio.wait_for(sleeps_mid_turn(engine, store, engine.pid), DEADLINE_S)
    )
    assert full - small > 200 * MiB, "rollout.kv_cache_gib=0.25"
    cut = result["versions"].index(1)
    assert len(result["tokens"]) == 200 and cut >= 20 and set(late["versions"]) == {1}
    agrees(new, [late], [PROMPTS[3]])
    old = AutoModelForCausalLM.from_pretrained(folder).float().eval()
    for model, part in ((old, slice(0, cut)), (new, slice(cut, None))):
        assert result["tokens"][part] == reference(model, PROMPTS[2], result["tokens"])[0][part]
    wait(engine.sleep())
    engine._process.kill()
    with pytest.raises(EngineDied):  # a turn that waits for an engine which will not wake
        wait(asyncio.wait_for(turn(engine, "never", PROMPTS[0]), DEADLINE_S))


def test_a_prefix_cached_before_an_engine_was_inactive_never_matches(start, wait, monkeypatch):
    """vLLM refuses to clear it while blocks are withheld, as a shared device's scheduler does."""
    from vllm.v1.core.block_pool import BlockPool

    # before the fork: the engine has it too
    monkeypatch.setattr(BlockPool, "reset_prefix_cache", lambda self: False)
    engine = start("Qwen3", engine_args={"block_size": 32})
    long = [PROMPTS[5] * 3]
    made = wait(turns(engine, long))
    assert wait(turns(engine, long))[0]["cached"] > 0
    wait(engine.deactivate())
    wait(engine.activate())
    again = wait(turns(engine, long))
    assert again[0]["cached"] == 0 and same(again, made)


def test_turns_that_run_when_an_engine_is_deactivated_come_back_with_what_they_have(start, wait):
    holding = {"scheduler_cls": "tests.engine.schedulers.HoldingScheduler"}
    engine = start("Qwen3", engine_args=holding)
    sampling = protocol.Sampling(max_new_tokens=200, temperature=0.0)  # no end of turn is drawn

    async def scenario() -> dict:
        running = asyncio.ensure_future(turn(engine, "held", PROMPTS[0], sampling))
        while engine.stats().generated_tokens < 10:
            await asyncio.sleep(0.005)
        await engine.deactivate()
        result = await running
        await engine.activate()
        return result

    result = wait(asyncio.wait_for(scenario(), DEADLINE_S))
    assert result["finish"] is protocol.FinishReason.ABORT and 10 <= len(result["tokens"]) < 200
    assert wait(turn(engine, "t", PROMPTS[0]))["tokens"]


def test_an_engine_whose_folder_changed_meanwhile_does_not_serve(start, wait, folders, tmp_path):
    folders["moving"] = tmp_path / "moving"
    perturbed(folders["Qwen3"]).save_pretrained(folders["moving"])
    engine = start("moving")
    wait(engine.deactivate())
    for file in folders["Qwen3"].glob("*.safetensors"):
        (folders["moving"] / file.name).write_bytes(file.read_bytes())
    with pytest.raises(EngineDied, match="not what they were before"):
        wait(engine.activate())
    wait(asyncio.wait_for(asyncio.shield(engine.died), DEADLINE_S))


def test_blocks_that_a_scheduler_releases_leave_resident_size(start, wait, tmp_path, monkeypatch):
    serving = msgspec.convert(yaml.safe_load((CONF / "serving/borrow.yaml").read_text()), Serving)
    for name, value in device.describe(tmp_path, serving, None).items():
        monkeypatch.setenv(name, value)
    engine = start("Qwen3")
    layout = worker(engine, wait, "rose_kv_layout")
    assert layout["held"] == 1  # vLLM's null block
    total = layout["blocks"] * layout["block_bytes"]
    assert layout["blocks"] == engine._llm.vllm_config.cache_config.num_gpu_blocks
    assert total > 200 * MiB
    everything = range(1, layout["blocks"])
    assert (
        worker(engine, wait, "rose_map_blocks", list(everything))
        > total - 2 * layout["block_bytes"]
    )
    made = wait(turns(engine))
    empty = resident_bytes(engine.pid)
    # of each a block, 128 KiB, stays cached: 48 MiB
    many = [np.random.default_rng(i).integers(2, 263, size=240).tolist() for i in range(384)]
    wait(turns(engine, many, protocol.Sampling(max_new_tokens=2), tag="fill"))
    full = resident_bytes(engine.pid)
    assert full - empty > 40 * MiB  # meanwhile the engine allocates and frees for itself, too
    assert (
        worker(engine, wait, "rose_release_blocks", list(everything))
        > total - 2 * layout["block_bytes"]
    )
    assert worker(engine, wait, "rose_kv_layout")["held"] == 1
    assert full - resident_bytes(engine.pid) > 40 * MiB
    wait(engine._llm.reset_prefix_cache())
    worker(engine, wait, "rose_map_blocks", list(everything))
    assert same(wait(turns(engine)), made)
    wait(engine.deactivate())
    assert worker(engine, wait, "rose_kv_layout")["mapped_bytes"] == 0
    wait(engine.activate())
    assert worker(engine, wait, "rose_kv_layout")["held"] == layout["blocks"]
    assert same(wait(turns(engine)), made)


def test_an_engine_that_shares_no_device_says_so_when_blocks_are_asked_of_it(warm, wait):
    engine = warm("Qwen3")
    with pytest.raises(Exception, match="started without ROSE_COSERVING"):
        worker(engine, wait, "rose_release_blocks", [1])


def test_an_inactive_rollout_engine_holds_no_kv_memory(start, wait, tmp_path, monkeypatch):
    monkeypatch.setattr(gate, "CONTROL_STALE_S", 3600.0)  # the engine is forked from here
    serving = msgspec.convert(yaml.safe_load((CONF / "serving/borrow.yaml").read_text()), Serving)
    lending = msgspec.structs.replace(serving.lending, kv_gib=0.25, stale_after_s=3600.0)
    for name, value in device.describe(
        tmp_path, msgspec.structs.replace(serving, lending=lending), None
    ).items():
        monkeypatch.setenv(name, value)
    for name, kind, said in (
        ("online", board.Online, {}),
        ("control", board.Control, {"lend": 1.0}),
    ):
        writer = board.Writer(tmp_path / name, kind)
        vars(writer.state).update(said)
        writer.write()
    engine = start(
        "Qwen3", engine_args={"scheduler_cls": "rose.parts.lending.vllm.rollout.scheduler"}
    )
    told = board.Reader(tmp_path / "rollout", board.Rollout)

    async def until_lent() -> None:
        while not told.read().kv_budget > 0:
            await asyncio.sleep(0.01)

    for _ in range(2):
        wait(asyncio.wait_for(until_lent(), DEADLINE_S))
        wait(engine.deactivate())
        layout = worker(engine, wait, "rose_kv_layout")
        assert layout["held"] == 1 and layout["mapped_bytes"] == told.read().kv_budget == 0
        wait(engine.activate())
