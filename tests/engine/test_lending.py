"""An engine whose memory goes back to the system, by block and as a whole, and that is right again afterwards."""

import asyncio

import msgspec
import numpy as np
import pytest
import yaml

from rose import protocol
from rose.config.tree import Serving
from rose.coserving import device
from rose.coserving.pages import resident_bytes
from rose.engine.vllm_engine import EngineDied, EngineError
from tests.engine.test_vllm_engine import CONF, PROMPTS, perturbed, publish, settings, turn, turns

pytestmark = pytest.mark.slow
MiB = 2**20


def worker(engine, loop, method: str, *args):
    """A call into the engine's one worker, as its scheduler makes."""
    return loop.run_until_complete(engine._llm.collective_rpc(method, args=args))[0]


def tokens(results) -> list[list[int]]:
    return [r["tokens"] for r in results]


def same(results, expected) -> bool:
    """Tokens; log-probabilities but for the rounding that a batch's composition brings."""
    return tokens(results) == tokens(expected) and all(
        np.allclose(r["logprobs"], e["logprobs"], atol=1e-4) for r, e in zip(results, expected))


@pytest.mark.parametrize("architecture", ["Qwen2", "Llama"])  # a head of its own; tied embeddings
def test_an_inactive_engine_is_small_and_an_activated_one_has_the_folders_weights(
        start, loop, folders, tmp_path, architecture):
    engine = start(architecture)
    before = loop.run_until_complete(engine.checksum())
    made = loop.run_until_complete(turns(engine))
    full = resident_bytes(engine.pid)
    for version in (1, None):  # deactivated with a trained version, and with the folder's own
        loop.run_until_complete(engine.deactivate())
        loop.run_until_complete(engine.deactivate())
        assert not engine.active
        for call in (turn(engine, "late", PROMPTS[0]), engine.load_version(1, "nowhere", settings()),
                     engine.checksum()):
            with pytest.raises(EngineError, match="inactive"):
                loop.run_until_complete(call)
        small = resident_bytes(engine.pid)
        loop.run_until_complete(engine.activate())
        assert engine.active and engine.version == -1
        assert loop.run_until_complete(engine.checksum()) == before
        again = loop.run_until_complete(turns(engine))
        assert same(again, made) and {v for r in again for v in r["versions"]} == {-1}
        if version is not None:
            store = publish(tmp_path / "store", folders[architecture], version, perturbed(folders[architecture]))
            loop.run_until_complete(engine.load_version(version, store, settings()))
            changed = loop.run_until_complete(turns(engine))
            assert tokens(changed) != tokens(made) and {v for r in changed for v in r["versions"]} == {version}
            assert loop.run_until_complete(engine.checksum()) != before
    assert full - small > 200 * MiB  # its KV cache is 256 MiB, its model less than one


def test_a_prefix_that_was_cached_before_an_engine_was_inactive_never_matches(start, loop, monkeypatch):
    """vLLM refuses to clear it while blocks are withheld, as a shared device's scheduler does."""
    from vllm.v1.core.block_pool import BlockPool

    monkeypatch.setattr(BlockPool, "reset_prefix_cache", lambda self: False)  # before the fork: the engine has it too
    engine = start("Qwen3", engine_args={"block_size": 32})
    long = [PROMPTS[5] * 3]
    made = loop.run_until_complete(turns(engine, long))
    assert loop.run_until_complete(turns(engine, long))[0]["cached"] > 0
    loop.run_until_complete(engine.deactivate())
    loop.run_until_complete(engine.activate())
    again = loop.run_until_complete(turns(engine, long))
    assert again[0]["cached"] == 0 and same(again, made)


def test_turns_that_run_when_an_engine_is_deactivated_come_back_with_what_they_have(start, loop):
    engine = start("Qwen3")

    async def scenario() -> dict:
        running = asyncio.ensure_future(turn(engine, "t", PROMPTS[0], protocol.Sampling(max_new_tokens=200)))
        while engine.stats().generated_tokens < 10:
            await asyncio.sleep(0.005)
        await engine.deactivate()
        result = await running
        await engine.activate()
        return result

    result = loop.run_until_complete(asyncio.wait_for(scenario(), 60))
    assert result["finish"] is protocol.FinishReason.ABORT and 10 <= len(result["tokens"]) < 200
    assert loop.run_until_complete(turn(engine, "t", PROMPTS[0]))["tokens"]


def test_an_engine_whose_folder_changed_meanwhile_does_not_serve(start, loop, folders, tmp_path):
    folders["moving"] = tmp_path / "moving"
    perturbed(folders["Qwen3"]).save_pretrained(folders["moving"])
    engine = start("moving")
    loop.run_until_complete(engine.deactivate())
    for file in folders["Qwen3"].glob("*.safetensors"):
        (folders["moving"] / file.name).write_bytes(file.read_bytes())
    with pytest.raises(EngineDied, match="not what they were before"):
        loop.run_until_complete(engine.activate())
    loop.run_until_complete(asyncio.wait_for(asyncio.shield(engine.died), 5))


def test_the_blocks_that_a_scheduler_releases_leave_the_engines_resident_size(start, loop, tmp_path, monkeypatch):
    serving = msgspec.convert(yaml.safe_load((CONF / "serving/borrow.yaml").read_text()), Serving)
    for name, value in device.describe(tmp_path, serving, None).items():
        monkeypatch.setenv(name, value)
    engine = start("Qwen3")
    layout = worker(engine, loop, "rose_kv_layout")
    assert layout["held"] == 1  # vLLM's null block
    total = layout["blocks"] * layout["block_bytes"]
    assert layout["blocks"] == engine._llm.vllm_config.cache_config.num_gpu_blocks and total > 200 * MiB
    everything = range(1, layout["blocks"])
    assert worker(engine, loop, "rose_map_blocks", list(everything)) > total - 2 * layout["block_bytes"]
    made = loop.run_until_complete(turns(engine))
    empty = resident_bytes(engine.pid)
    # of each a block, 128 KiB, stays cached: 48 MiB
    many = [np.random.default_rng(i).integers(2, 263, size=240).tolist() for i in range(384)]
    loop.run_until_complete(turns(engine, many, protocol.Sampling(max_new_tokens=2), tag="fill"))
    full = resident_bytes(engine.pid)
    assert full - empty > 40 * MiB  # meanwhile the engine allocates and frees for itself, too
    assert worker(engine, loop, "rose_release_blocks", list(everything)) > total - 2 * layout["block_bytes"]
    assert worker(engine, loop, "rose_kv_layout")["held"] == 1
    assert full - resident_bytes(engine.pid) > 40 * MiB
    loop.run_until_complete(engine._llm.reset_prefix_cache())
    worker(engine, loop, "rose_map_blocks", list(everything))
    assert same(loop.run_until_complete(turns(engine)), made)
    loop.run_until_complete(engine.deactivate())
    assert worker(engine, loop, "rose_kv_layout")["mapped_bytes"] == 0
    loop.run_until_complete(engine.activate())
    assert worker(engine, loop, "rose_kv_layout")["held"] == layout["blocks"]
    assert same(loop.run_until_complete(turns(engine)), made)


def test_an_engine_that_shares_no_device_says_so_when_blocks_are_asked_of_it(start, loop):
    engine = start("Qwen3")
    with pytest.raises(Exception, match="started without ROSE_COSERVING"):
        worker(engine, loop, "rose_release_blocks", [1])
