"""An engine whose memory goes back to the system, and that is right again afterwards."""

import asyncio

import numpy as np
import pytest

from rose import protocol
from rose.engine.vllm_engine import EngineDied, EngineError
from tests.engine.turns import (
    DEADLINE_S,
    LONG,
    PROMPTS,
    agrees,
    dies,
    generated,
    model_of,
    perturbed,
    publish,
    reference,
    scheduled_by,
    settings,
    turn,
    turns,
)
from tests.processes import resident_bytes

pytestmark = pytest.mark.slow
MiB = 2**20


def tokens(results) -> list[list[int]]:
    return [r["tokens"] for r in results]


def same(results, expected) -> bool:
    """Tokens; log-probabilities but for the rounding that a batch's composition brings."""
    return tokens(results) == tokens(expected) and all(
        np.allclose(r["logprobs"], e["logprobs"], atol=1e-4)
        for r, e in zip(results, expected, strict=False)
    )


@pytest.mark.parametrize("architecture", ["Qwen2", "Llama"])  # a head of its own; tied embeddings
def test_an_inactive_engine_is_small_and_an_activated_one_has_the_folders_weights(
    start, wait, folders, tmp_path, architecture
):
    engine = start(architecture)
    before = wait(engine.checksum())
    made = wait(turns(engine))
    full = resident_bytes(engine.pid)
    # deactivated with the folder's own weights, and with a trained version
    for version in (1, None):
        wait(engine.deactivate())
        wait(engine.deactivate())
        assert not engine.active
        calls = (turn(engine, "late", PROMPTS[0]), engine.load_version(1, "nowhere", settings()))
        for call in (*calls, engine.checksum()):
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
            new = perturbed(folders[architecture])
            store = publish(tmp_path / "store", folders[architecture], version, new)
            wait(engine.load_version(version, store, settings()))
            changed = wait(turns(engine))
            assert tokens(changed) != tokens(made)
            assert {v for r in changed for v in r["versions"]} == {version}
            assert wait(engine.checksum()) != before


async def sleeps_mid_turn(engine, store: str, pid: int) -> tuple[dict, dict, int, int]:
    """(a turn during which the engine sleeps and gets version 1, one that is asked for meanwhile,
    resident bytes before and in its sleep)."""
    before = engine.stats().generated_tokens
    running = asyncio.ensure_future(turn(engine, "t", PROMPTS[2], LONG))
    await generated(engine, before + 20)
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


def test_an_engine_that_sleeps_gives_its_kv_cache_back_and_goes_on_with_the_weights_that_came_meanwhile(
    start, wait, folders, tmp_path
):
    engine = start("Qwen3", engine_args=scheduled_by("Patient"))
    folder, new = folders["Qwen3"], perturbed(folders["Qwen3"])
    store = publish(tmp_path / "store", folder, 1, new)
    wait(turns(engine, PROMPTS[:4]))  # fills some of the cache
    scene = sleeps_mid_turn(engine, store, engine.pid)
    result, late, full, small = wait(asyncio.wait_for(scene, DEADLINE_S))
    assert full - small > 200 * MiB, "rollout.kv_cache_gib=0.25"
    cut = result["versions"].index(1)
    assert len(result["tokens"]) == 200 and cut >= 20 and set(late["versions"]) == {1}
    agrees(new, [late], [PROMPTS[3]])
    for model, part in ((model_of(folder), slice(0, cut)), (new, slice(cut, None))):
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
    engine = start("Qwen3", engine_args=scheduled_by("Holding"))

    async def scenario() -> dict:
        running = asyncio.ensure_future(turn(engine, "held", PROMPTS[0], LONG))
        await generated(engine, 10)
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
    dies(wait, engine)
