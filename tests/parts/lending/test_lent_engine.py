"""A rollout engine whose memory goes back to the system by block, and that is right afterwards."""

import asyncio
from functools import partial

import msgspec
import numpy as np
import pytest

from rose import protocol
from rose.parts.lending import board, settings
from rose.parts.lending.rules import gate
from rose.parts.lending.vllm import device
from tests.engine import conftest as engines
from tests.engine.test_activation import DEADLINE_S, MiB, same, turns
from tests.processes import resident_bytes

pytestmark = pytest.mark.slow
loop, folders, rollout = engines.loop, engines.folders, engines.rollout
model_config, start_one, start = engines.model_config, engines.start_one, engines.start


def worker(engine, loop, method: str, *args):
    """A call into the engine's one worker, as its scheduler makes."""
    return loop.run_until_complete(engine._llm.collective_rpc(method, args=args))[0]


def co_serving(folder, monkeypatch, serving):
    for name, value in device.describe(folder, serving, None).items():
        monkeypatch.setenv(name, value)


def test_blocks_that_are_released_leave_the_resident_size(start, loop, tmp_path, monkeypatch):
    co_serving(tmp_path, monkeypatch, settings.of_server([]))
    engine = start("Qwen3")
    call = partial(worker, engine, loop)
    layout = call("rose_kv_layout")
    assert layout["held"] == 1  # vLLM's null block
    assert layout["blocks"] == engine._llm.vllm_config.cache_config.num_gpu_blocks
    block_bytes, everything = layout["block_bytes"], list(range(1, layout["blocks"]))
    total = layout["blocks"] * block_bytes
    assert total > 200 * MiB
    assert call("rose_map_blocks", everything) > total - 2 * block_bytes
    made = loop.run_until_complete(turns(engine))
    empty = resident_bytes(engine.pid)
    # of each a block, 128 KiB, stays cached: 48 MiB
    many = [np.random.default_rng(i).integers(2, 263, size=240).tolist() for i in range(384)]
    loop.run_until_complete(turns(engine, many, protocol.Sampling(max_new_tokens=2), tag="fill"))
    full = resident_bytes(engine.pid)
    assert full - empty > 40 * MiB  # meanwhile the engine allocates and frees for itself, too
    assert call("rose_release_blocks", everything) > total - 2 * block_bytes
    assert call("rose_kv_layout")["held"] == 1
    assert full - resident_bytes(engine.pid) > 40 * MiB
    loop.run_until_complete(engine._llm.reset_prefix_cache())
    call("rose_map_blocks", everything)
    assert same(loop.run_until_complete(turns(engine)), made)
    loop.run_until_complete(engine.deactivate())
    assert call("rose_kv_layout")["mapped_bytes"] == 0
    loop.run_until_complete(engine.activate())
    assert call("rose_kv_layout")["held"] == layout["blocks"]
    assert same(loop.run_until_complete(turns(engine)), made)


def test_an_inactive_rollout_engine_holds_no_kv_memory(start, loop, tmp_path, monkeypatch):
    monkeypatch.setattr(gate, "CONTROL_STALE_S", 3600.0)  # the engine is forked from here
    serving = settings.of_server([])
    lending = msgspec.structs.replace(serving.lending, kv_gib=0.25, stale_after_s=3600.0)
    co_serving(tmp_path, monkeypatch, msgspec.structs.replace(serving, lending=lending))
    board.Writer(tmp_path / "online", board.Online).write()
    control = board.Writer(tmp_path / "control", board.Control)
    control.state.lend = 1.0
    control.write()
    scheduler = "rose.parts.lending.vllm.rollout.scheduler"
    engine = start("Qwen3", engine_args={"scheduler_cls": scheduler})
    told = board.Reader(tmp_path / "rollout", board.Rollout)

    async def until_lent() -> None:
        while not told.read().kv_budget > 0:
            await asyncio.sleep(0.01)

    for _ in range(2):
        loop.run_until_complete(asyncio.wait_for(until_lent(), DEADLINE_S))
        loop.run_until_complete(engine.deactivate())
        layout = worker(engine, loop, "rose_kv_layout")
        assert layout["held"] == 1 and layout["mapped_bytes"] == told.read().kv_budget == 0
        loop.run_until_complete(engine.activate())
