"""The check of a rollout engine that stops between layers: a real vLLM engine R, and beside it a
process S that raises the flag while it computes. S is a CUDA graph of the decode products of a 7B
model, without vLLM, so that only the device decides how long its steps take.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import shutil
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from scripts.harness import configured
from tests.gpu.frame import Report, check
from tests.gpu.model import folder, of_model, shape_of

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
    # CUDA graphs of R, if not those of a shared device: FULL_AND_PIECEWISE where a graph holds stops
    graphs: str | None = None
    # Most that S's median step may take beside an R that stops, as a multiple of its step alone.
    slower: float = 1.25


GPU = Sizes()
CPU = Sizes("cpu", "float32", 0.0625, 512, 4, (32, 64), 256, 1.5, None, 4.0)


def online(boards: str, gpus: bool, orders: Any) -> None:
    """Act as S: answer each order with the milliseconds of its steps. An order is a number of
    seconds, and by how many seconds the flag is up before each step; less than 0: it stays up."""
    import torch

    from rose.parts.lending.flag import Flag

    flag, step = Flag(Path(boards)), graph(torch) if gpus else product(torch)
    flag.up = False
    step()
    orders.send("ready")
    while (order := orders.recv()) is not None:
        (seconds, ahead), took = order, []
        end = time.monotonic() + seconds
        flag.up = ahead < 0
        while time.monotonic() < end:
            time.sleep(PAUSE_S)
            flag.up = True
            time.sleep(max(0.0, ahead))
            began = time.perf_counter()
            step()
            took.append(1e3 * (time.perf_counter() - began))
            flag.up = ahead < 0
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
        await _stops(report, boards, child, here)
    finally:
        child.kill()
        shutil.rmtree(boards, ignore_errors=True)


async def _stops(report: Report, boards: Path, child: Any, orders: Any) -> None:
    from rose.engine.vllm_engine import Engine
    from rose.parts.lending import settings
    from rose.parts.lending.flag import Flag
    from rose.parts.lending.vllm import device

    sizes = report.sizes
    os.environ.update(device.describe(boards, settings.of_server([]), None))
    flag = Flag(boards)
    own = ["cluster=gpus", "cluster.gpus=2", "trainer.ranks=1"] if report.gpus else []
    if sizes.graphs:
        graphs = f"{{cudagraph_mode: {sizes.graphs}}}"
        own.append(f"+rollout.engine_args.compilation_config={graphs}")
    words = f"rollout={sizes.rollout} rollout.max_sequences={sizes.turns} "
    words += f"rollout.max_batched_tokens={sizes.step} rollout.kv_cache_gib={sizes.kv_gib} "
    words += "rollout.gpu_memory_utilization=0.5 "
    words += f"trainer.micro_batch_tokens={max(2048, sizes.context)}"
    config = configured(*own, *words.split(), *of_model(report, sizes.context))
    began = time.monotonic()
    engine = await Engine.start(
        folder(report), config.rollout, config.model, gpus=report.gpus, seed=1
    )
    report.figure("start of R", time.monotonic() - began, "s")
    compiled = engine._llm.vllm_config.compilation_config
    report.figure("CUDA graphs", str(compiled.cudagraph_mode).rpartition(".")[2])
    report.say(json.dumps([str(op) for op in compiled.splitting_ops or ()]))
    layout = (await engine._llm.collective_rpc("rose_kv_layout"))[0]
    await engine._llm.collective_rpc("rose_map_blocks", args=(list(range(layout["blocks"])),))
    child.start()
    if not await asyncio.to_thread(orders.poll, START_S):
        raise RuntimeError(f"S is not ready after {START_S:g} s")
    orders.recv()
    if report.gpus:
        _in_a_graph(report, flag)
    both = Both(report, engine, orders)
    alone = await both.phase("alone")
    both.begin()
    try:
        await both.until_made(1)
        report.figure("R, S idle", await both.rate(sizes.phase_s), "token/s")
        unstopped = await both.phase("beside R without stops")
        flag.ignored = False
        stopped = await both.phase("beside R with stops", most=sizes.slower * alone)
        early = await both.phase(f"beside R, flag up {1e3 * AHEAD_S:g} ms before", AHEAD_S)
        still = await both.phase("beside R that is stopped all the time", -1.0)
        report.figure("S beside R, without stops", unstopped / alone, "of alone")
        report.figure("S beside R, with stops", stopped / alone, "of alone")
        report.figure("S beside R, with stops in time", early / alone, "of alone")
        report.figure("S beside R, which is stopped all the time", still / alone, "of alone")
        flag.up = True
        async with asyncio.timeout(10 * UNTIL_S):  # Tokens of steps before arrive.
            while await both.rate(STOPPED_S):
                pass
        report.figure("R while the flag is up", await both.rate(1.0), "token/s", equal=0)
        flag.up, before = False, both.made
        began = time.monotonic()
        await both.until_made(before + 1)
        report.figure("R goes on after the flag is down", 1e3 * (time.monotonic() - began), "ms")
    finally:
        flag.up, flag.ignored = False, True
        orders.send(None)
        await both.end()
        await engine.shutdown()


class Both:
    """The turns of R, and the measurement of S beside them."""

    def __init__(self, report: Report, engine: Any, orders: Any) -> None:
        self.report, self.engine, self.orders = report, engine, orders
        self.made, self.tasks = 0, []
        self.vocabulary = shape_of(report).vocab

    def begin(self) -> None:
        turns = range(self.report.sizes.turns)
        self.tasks = [asyncio.create_task(self.rollouts(number)) for number in turns]

    async def rollouts(self, number: int) -> None:
        from rose import protocol

        dice, (prompt, new) = np.random.default_rng(number), self.report.sizes.turn
        for at in range(10**6):
            tokens = protocol.pack_tokens(dice.integers(0, self.vocabulary, prompt))
            sampling = protocol.Sampling(max_new_tokens=new)
            async for chunk in self.engine.generate(f"r{number}.{at}", tokens, sampling):
                self.made += len(chunk.tokens)

    async def phase(self, name: str, ahead: float = 0.0, most: float | None = None) -> float:
        """Measure S for a phase; return the median of its steps in milliseconds."""
        self.orders.send((self.report.sizes.phase_s, ahead))
        before, began = self.made, time.monotonic()
        took = sorted(await asyncio.to_thread(self.orders.recv))
        rate = (self.made - before) / (time.monotonic() - began)
        middle, last = took[len(took) // 2], took[99 * (len(took) - 1) // 100]
        self.report.figure(f"S {name}: step P50", middle, "ms", most=most)
        self.report.figure(f"S {name}: step P99", last, "ms")
        if self.tasks:
            self.report.figure(f"R's tokens, S {name}", rate, "token/s")
        return middle

    async def rate(self, seconds: float) -> float:
        before, began = self.made, time.monotonic()
        await asyncio.sleep(seconds)
        return (self.made - before) / (time.monotonic() - began)

    async def until_made(self, count: int) -> None:
        async with asyncio.timeout(UNTIL_S):
            while self.made < count:
                await asyncio.sleep(0.001)
                for task in self.tasks:
                    if task.done():
                        task.result()

    async def end(self) -> None:
        for task in self.tasks:
            task.cancel()
        with suppress(asyncio.CancelledError):
            await asyncio.gather(*self.tasks, return_exceptions=True)


def _in_a_graph(report: Report, flag: Any) -> None:
    """Report whether a CUDA graph can hold a stop. Then a rollout engine could keep its graphs of
    whole steps. This process has no other work on the device."""
    import torch

    from rose.parts.lending.vllm.stops import on_gpu

    try:
        stop = on_gpu(flag, torch.device("cuda", 0))
        x = torch.zeros(1, device="cuda")
        made = torch.cuda.CUDAGraph()
        with torch.cuda.graph(made):
            stop()
            x += 1
        flag.ignored, flag.up = False, True
        made.replay()
        time.sleep(0.1)
        held = not torch.cuda.current_stream().query()
        flag.ignored, flag.up = True, False
        torch.cuda.synchronize()
        report.figure("a CUDA graph can hold a stop", held and x.item() == 1)
    except Exception as error:
        report.say(f"a CUDA graph can't hold a stop: {error!r}"[:400])
        report.figure("a CUDA graph can hold a stop", False)
    finally:
        flag.ignored, flag.up = True, False
