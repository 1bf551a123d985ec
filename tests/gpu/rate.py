"""The check of an engine's rate for gpu_check.py: what bounds many turns at once.

Two engines on one card run the same turns in alternation, since a machine's speed drifts: one that
runs the model in the engine process, as vLLM does, and one that runs it in a worker process. The
first runs them as vLLM does without ROSE, too. On a GPU the step's time is that of Python in the
engine process: `wait`, the time that it waits for the GPU, is the smallest part.
"""

from __future__ import annotations

import gc
import time
from typing import Any

import msgspec
import psutil

from tests.gpu import engine
from tests.gpu.frame import Report, check

EXTENSION = {"worker_extension_cls": "tests.gpu.rate_worker.Extension"}
APART = {"distributed_executor_backend": "mp"}


class Rates(engine.Engines):
    rounds: int = 2


GPU = Rates("gpu", "bfloat16", 0.3, 256, 256, 256, 256, 0, 0, 0.0, 0, 0, kv_gib=20.0)
CPU = Rates("cpu", "bfloat16", 0.9, 16, 16, 32, 8, 0, 0, 0.0, 0, 0, rounds=1)


class Way(msgspec.Struct, frozen=True):
    """A setting of the levers."""

    name: str
    kept: int = 32  # tokens after which the engine process sends a turn's outputs
    read: int = 32  # tokens after which a turn's reader receives them
    joined: bool = True  # log-probabilities of several tokens are read at once
    slots: bool = True  # the scheduler doesn't search for KV blocks where none is needed
    collects: bool = True  # both processes collect garbage


PLAIN = Way("vLLM alone", 1, 8, False, False)
OURS = Way("ROSE")
WAYS = (PLAIN, OURS, Way("ROSE without garbage collection", collects=False))


@check(
    "what bounds many turns at once: the parts of a step, by vLLM alone, ROSE, and a worker",
    "the engine's own words are in the log; VLLM_LOGGING_LEVEL=INFO says more",
    {"cuda": GPU, "cpu": CPU},
)
async def rate(report: Report) -> None:
    sequences = f"rollout.max_sequences={report.sizes.turns}"
    config = engine.settings(report, "rollout.stream_interval=1", sequences)
    apart = engine.settings(report, f"rollout.stream_interval={OURS.kept}", sequences)
    running = [await _start(report, config, EXTENSION), await _start(report, apart, APART)]
    try:
        engine.ways(report, running[1])
        for one in running:
            one._stop_tokens = []  # each turn is one request
        for way in (PLAIN, OURS):
            await _alone(report, running[0], way)
        await _alone(report, running[1], None)
        rates: dict[str, list[float]] = {}
        for number in range(report.sizes.rounds + 1):  # the first of them compiles kernels
            for way in (*WAYS, None):
                name = "ROSE, a worker process" if way is None else way.name
                found = await _measure(report, running[way is None], way, f"{name} {number}")
                rates.setdefault(name, []).append(found)
            if number == 0:
                rates.clear()
        best = {name: max(found) for name, found in rates.items()}
        for name, found in best.items():
            report.figure(f"{name}: of {PLAIN.name}", found / best[PLAIN.name], "times")
    finally:
        gc.enable()
        for one in running:
            await one.shutdown()


async def _start(report: Report, config: Any, arguments: dict) -> Any:
    arguments = config.rollout.engine_args | arguments
    rollout = msgspec.structs.replace(config.rollout, engine_args=arguments)
    return await engine.start(report, msgspec.structs.replace(config, rollout=rollout))


async def _set(running: Any, way: Way | None) -> None:
    """Set the levers; those of an engine with a worker process stand as ROSE sets them."""
    if way is not None:
        levers = way.kept, way.collects, way.slots
        await running._llm.collective_rpc("rate_levers", args=levers)
        running._llm.output_processor.stream_interval = way.read
        gc.enable() if way.collects else gc.disable()
    await running._llm.reset_prefix_cache()


async def _measure(report: Report, running: Any, way: Way | None, name: str) -> float:
    """Report and return the rate of all turns at once; report the processor time of a token, and
    what a step's wall time goes to."""
    from vllm.v1.engine.logprobs import LogprobsProcessor

    sizes, join = report.sizes, LogprobsProcessor._update_sample_logprobs
    await _set(running, way)
    if way is not None and not way.joined:
        LogprobsProcessor._update_sample_logprobs = join.__wrapped__
    prompts = engine.prompts(report, sizes.turns, 3)
    before, began = _processor_s(running), time.monotonic()
    try:
        await engine.turns(running, name, prompts, sizes.new)
    finally:
        LogprobsProcessor._update_sample_logprobs = join
    took, tokens = time.monotonic() - began, sizes.turns * sizes.new
    report.figure(f"{name}: {sizes.turns} turns", tokens / took, "token/s")
    names, now = ("engine", "rank"), _processor_s(running)
    for process, after, earlier in zip(names, now, before, strict=True):
        spent = 1e6 * (after - earlier) / tokens
        report.figure(f"{name}: processor time, {process}", spent, "us a token")
    if way is not None:
        await _parts(report, running, name)
    return tokens / took


async def _parts(report: Report, running: Any, name: str) -> None:
    """Report the mean time of a step's parts since the levers were set."""
    (spent,) = await running._llm.collective_rpc("rate_spent")
    steps = spent.pop("steps")
    parts = [f"{part} {1000 * s / steps:.2f}" for part, s in sorted(spent.items())]
    report.figure(f"{name}: ms of {steps:.0f} steps", "; ".join(parts))


async def _alone(report: Report, running: Any, way: Way | None) -> None:
    """Report the rate of one turn alone."""
    name = "ROSE, a worker process" if way is None else way.name
    for part in ("warm", "alone"):
        await _set(running, way)
        prompt, began = engine.prompts(report, 1, 2)[0], time.monotonic()
        await engine.turn(running, f"{part}, {name}", prompt, report.sizes.alone)
    rate = report.sizes.alone / (time.monotonic() - began)
    report.figure(f"{name}: one turn", rate, "token/s")
    if way is not None:
        await _parts(report, running, f"{name}, one turn")


def _processor_s(running: Any) -> tuple[float, float]:
    """Return the processor seconds of the engine's processes and of this one."""
    core = psutil.Process(running.pid)
    both = [core, *core.children(recursive=True)], [psutil.Process()]
    return tuple(sum(sum(one.cpu_times()[:2]) for one in processes) for processes in both)
