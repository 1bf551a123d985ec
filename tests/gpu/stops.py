"""The check of a rollout engine that stops between layers: a real vLLM engine R, and beside it a
process S that raises the flag while it computes. S is a CUDA graph of the decode products of a 7B
model, without vLLM, so that only the device decides how long its steps take.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import shutil
import time
from pathlib import Path
from typing import Any

import msgspec

from scripts.harness import configured
from tests.gpu.frame import Report, check
from tests.gpu.model import folder, of_model
from tests.gpu.users import Rollouts, until

PAUSE_S = 0.003  # seconds between two steps of S
AHEAD_S = 0.001  # seconds in which S's engine prepares a step after it has raised the flag
STOPPED_S = 0.3  # seconds without a token after which a stop has taken effect
LAYERS, HIDDEN, INTERMEDIATE = 28, 3584, 18944  # shapes of Qwen2.5-7B
START_S = 60.0
UNTIL_S = 20.0


class Sizes(msgspec.Struct):
    rollout: str = "gpu"  # file of conf/rollout
    dtype: str = "bfloat16"
    kv_gib: float = 8.0
    context: int = 1024
    turns: int = 64  # concurrent turns of R
    turn: tuple[int, int] = (768, 32)  # prompt and new tokens of one
    step: int = 512  # most tokens of a step of R, as serving.lending.chunk_tokens
    phase_s: float = 4.0  # seconds of each phase
    # Most that S's median step may take beside an R that stops, as a multiple of its step alone.
    slower: float = 1.25


GPU = Sizes()
CPU = Sizes("cpu", "float32", 0.0625, 512, 4, (32, 64), 256, 1.5, 4.0)


def online(boards: str, gpus: bool, orders: Any) -> None:
    """Act as S: answer each order with the milliseconds of its steps. An order is a number of
    seconds, and by how many seconds the flag is up before each step."""
    import torch

    from rose.parts.lending.flag import Flag

    flag, step = Flag(Path(boards)), graph(torch) if gpus else product(torch)
    flag.up = False
    step()
    orders.send("ready")
    while (order := orders.recv()) is not None:
        (seconds, ahead), took = order, []
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            time.sleep(PAUSE_S)
            flag.up = True
            time.sleep(ahead)
            began = time.perf_counter()
            step()
            took.append(1e3 * (time.perf_counter() - began))
            flag.up = False
        orders.send(took)


def graph(torch):
    shape = (HIDDEN, 3 * INTERMEDIATE)
    matrices = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(LAYERS)]
    x = torch.randn(16, HIDDEN, device="cuda", dtype=torch.bfloat16)

    def layers() -> None:
        for matrix in matrices:
            x @ matrix

    layers()
    torch.cuda.synchronize()
    made = torch.cuda.CUDAGraph()
    with torch.cuda.graph(made):
        layers()

    def step() -> None:
        made.replay()
        torch.cuda.synchronize()

    return step


def product(torch):
    torch.set_num_threads(1)
    x = torch.randn(512, 512)
    return lambda: [x @ x for _ in range(8)]


@check(
    "a rollout engine that stops between layers while another process computes",
    "the log has the engine's words; rose/parts/lending/vllm/stops.py",
    {"cuda": GPU, "cpu": CPU},
    150.0,
)
async def stops(report: Report) -> None:
    boards = Path("/dev/shm") / f"rose-gpu-check-stops-{os.getpid()}"
    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe()
    child = spawn.Process(target=online, args=(str(boards), report.gpus, there), daemon=True)
    try:
        await _stops(report, boards, child, here, there)
    finally:
        if child.pid is not None:
            child.kill()
        shutil.rmtree(boards, ignore_errors=True)


async def _engine(report: Report, boards: Path) -> Any:
    """Start R beside the flag of `boards`, with memory for its whole KV cache."""
    from rose.engine.vllm_engine import Engine
    from rose.parts.lending import settings
    from rose.parts.lending.vllm import device

    sizes = report.sizes
    os.environ.update(device.describe(boards, settings.of_server([]), None))
    own = ["cluster=gpus", "cluster.gpus=2", "trainer.ranks=1"] if report.gpus else []
    words = f"rollout={sizes.rollout} rollout.max_sequences={sizes.turns} "
    words += f"rollout.max_batched_tokens={sizes.step} rollout.kv_cache_gib={sizes.kv_gib} "
    words += "rollout.gpu_memory_utilization=0.5 "
    words += f"trainer.micro_batch_tokens={max(2048, sizes.context)}"
    c = configured(*own, *words.split(), *of_model(report, sizes.context))
    with report.took("start of R"):
        engine = await Engine.start(folder(report), c.rollout, c.model, gpus=report.gpus, seed=1)
    graphs = engine._llm.vllm_config.compilation_config.cudagraph_mode
    report.figure("CUDA graphs", str(graphs).rpartition(".")[2])
    layout = (await engine._llm.collective_rpc("rose_kv_layout"))[0]
    await engine._llm.collective_rpc("rose_map_blocks", args=(list(range(layout["blocks"])),))
    return engine


async def _stops(report: Report, boards: Path, child: Any, orders: Any, there: Any) -> None:
    from rose.parts.lending.flag import Flag

    sizes, engine, flag = report.sizes, await _engine(report, boards), Flag(boards)
    child.start()
    there.close()  # Otherwise `orders.recv` would wait for ever for a child that has died.
    if not await asyncio.to_thread(orders.poll, START_S):
        raise RuntimeError(f"S is not ready after {START_S:g} s")
    orders.recv()
    turns = Rollouts(report, engine)

    async def phase(name: str, ahead: float = 0.0, most: float | None = None) -> float:
        """Measure S for a phase; return the median of its steps in milliseconds."""
        orders.send((sizes.phase_s, ahead))
        before, began = turns.made, time.monotonic()
        took = sorted(await asyncio.to_thread(orders.recv))
        rate = (turns.made - before) / (time.monotonic() - began)
        report.figure(f"S {name}: step P50", took[len(took) // 2], "ms", most=most)
        report.figure(f"S {name}: step P99", took[99 * (len(took) - 1) // 100], "ms")
        if turns.tasks:
            report.figure(f"R's tokens, S {name}", rate, "token/s")
        return took[len(took) // 2]

    async def until_made(count: int) -> float:
        return await until(lambda: turns.made >= count, UNTIL_S, lambda: "R", turns.tasks, 0.001)

    alone = await phase("alone")
    turns.begin(sizes.turns)
    try:
        await until_made(1)
        report.figure("R, S idle", await turns.rate(sizes.phase_s), "token/s")
        found = {"without stops": await phase("beside R without stops")}
        flag.ignored = False
        found["with stops"] = await phase("beside R with stops")
        # as an online engine does, which raises the flag before it plans a step
        early = f"beside R, flag up {1e3 * AHEAD_S:g} ms before"
        found["with stops in time"] = await phase(early, AHEAD_S, sizes.slower * alone)
        for name, took in found.items():
            report.figure(f"S beside R, {name}", took / alone, "of alone")
        flag.up = True
        async with asyncio.timeout(10 * UNTIL_S):  # Tokens of steps before arrive.
            while await turns.rate(STOPPED_S):
                pass
        report.figure("R while the flag is up", await turns.rate(1.0), "token/s", equal=0)
        flag.up = False
        took = await until_made(turns.made + 1)
        report.figure("R goes on after the flag is down", 1e3 * took, "ms")
    finally:
        flag.up, flag.ignored = False, True
        orders.send(None)
        await turns.end()
        await engine.shutdown()
