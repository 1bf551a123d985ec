"""The check of an engine's rate for gpu_check.py: what bounds many turns at once.

One engine runs the same turns with each lever apart, with all of them, and as vLLM does without
ROSE. The figures show what each lever gains on this machine, and what a step's time goes to.
"""

from __future__ import annotations

import asyncio
import gc
import time
from typing import Any

import msgspec
import psutil

from tests.gpu import engine
from tests.gpu.frame import Check, Report
from tests.gpu.model import folder

SWITCH_S = 0.005  # Python's own
GPU = engine.Engines("gpu", "bfloat16", 0.9, 256, 256, 256, 256, 0, 0, 0.0, 0, 0)
CPU = engine.Engines("cpu", "bfloat16", 0.9, 16, 16, 32, 8, 0, 0, 0.0, 0, 0)


class Way(msgspec.Struct, frozen=True):
    """A setting of all levers."""

    name: str
    kept: int = 1  # tokens after which the engine process sends a turn's outputs
    read: int = 8  # tokens after which a turn's reader receives them
    joined: bool = False  # log-probabilities of several tokens are read at once
    collects: bool = True  # both processes collect garbage
    switch_s: float = SWITCH_S
    wide: bool = False  # the kernel of log-probabilities reads wide blocks
    slots: bool = False  # vLLM doesn't search for KV blocks where none is needed


PLAIN = Way("vLLM's outputs")
ALL = Way("all of these", 32, 32, True, wide=True, slots=True)
WAYS = (
    PLAIN,
    Way("log-probabilities read at once", joined=True),
    Way("kept for 8 tokens", 8),
    Way("kept for 8 tokens, and read at once", 8, joined=True),
    Way("kept for 32 tokens, and read at once", 32, 32, joined=True),
    Way("wide blocks", wide=True),
    Way("no search for KV blocks", slots=True),
    Way("no garbage collection", collects=False),
    Way("threads switch after 0.5 ms", switch_s=SWITCH_S / 10),
    ALL,
)


def rate(report: Report) -> None:
    asyncio.run(_rate(report))


async def _rate(report: Report) -> None:
    config = engine.settings(
        report, "rollout.stream_interval=1", f"rollout.max_sequences={report.sizes.turns}"
    )
    arguments = config.rollout.engine_args | {
        "worker_extension_cls": "tests.gpu.rate_worker.Extension"
    }
    rollout = msgspec.structs.replace(config.rollout, engine_args=arguments)
    running = await engine.start(report, msgspec.structs.replace(config, rollout=rollout))
    try:
        engine.ways(report, running)
        running._stop_tokens = []  # each turn is one request
        if report.gpus:
            await _kernel(report, running)
        await _alone(report, running, PLAIN)
        await _alone(report, running, ALL)
        await _measure(report, running, msgspec.structs.replace(PLAIN, name="the first time"))
        for way in WAYS:
            await _measure(report, running, way, parts=way in (PLAIN, ALL))
        await _bare(report, running)
    finally:
        gc.enable()
        await running.shutdown()


async def _measure(report: Report, running: Any, way: Way, parts: bool = False) -> None:
    """Report the rate of all turns at once by this way, the processor time of a token, and for
    `parts` what a step's wall time goes to."""
    from vllm.v1.engine.logprobs import LogprobsProcessor

    sizes = report.sizes
    llm, join = running._llm, LogprobsProcessor._update_sample_logprobs
    await llm.collective_rpc("rate_levers", args=levers(way))
    llm.output_processor.stream_interval = way.read
    if not way.joined:
        LogprobsProcessor._update_sample_logprobs = join.__wrapped__
    gc.enable() if way.collects else gc.disable()
    prompts = engine.prompts(report, sizes.turns, 3)
    await _clear(running)
    before, began = _processor_s(running), time.monotonic()
    try:
        await asyncio.gather(
            *(
                engine.turn(running, f"{way.name} {i}", prompt, sizes.new)
                for i, prompt in enumerate(prompts)
            )
        )
    finally:
        LogprobsProcessor._update_sample_logprobs = join
    took, tokens = time.monotonic() - began, sizes.turns * sizes.new
    report.figure(f"{sizes.turns} turns, {way.name}", tokens / took, "token/s")
    for process, after, earlier in zip(
        ("engine", "rank"), _processor_s(running), before, strict=True
    ):
        report.figure(
            f"{process}'s processor time, {way.name}",
            1e6 * (after - earlier) / tokens,
            "us a token",
        )
    if parts:
        await _parts(report, running, way.name)


def levers(way: Way) -> tuple:
    return way.kept, way.collects, way.switch_s, way.wide, way.slots


async def _parts(report: Report, running: Any, name: str) -> None:
    """Report the mean time of a step's parts since the levers were set."""
    (spent,) = await running._llm.collective_rpc("rate_spent")
    steps = spent.pop("steps")
    report.figure(f"{name}: steps", steps)
    for part, seconds in sorted(spent.items()):
        report.figure(f"{name}: {part}", 1000 * seconds / steps, "ms a step")


async def _alone(report: Report, running: Any, way: Way) -> None:
    """Report the rate of one turn alone."""
    for name in ("warm", "alone"):
        await running._llm.collective_rpc("rate_levers", args=levers(way))
        prompt, began = engine.prompts(report, 1, 2)[0], time.monotonic()
        await engine.turn(running, f"{name}, {way.name}", prompt, report.sizes.alone)
    rate = report.sizes.alone / (time.monotonic() - began)
    report.figure(f"one turn, {way.name}", rate, "token/s")
    await _parts(report, running, f"one turn, {way.name}")


async def _kernel(report: Report, running: Any) -> None:
    from rose.config import read_shape

    for rows in (1, report.sizes.turns):
        arguments = (rows, read_shape(folder(report)).vocab)
        (took,) = await running._llm.collective_rpc("rate_kernel", args=arguments)
        for name, value in took.items():
            unit = "nats" if name == "largest difference" else "us"
            report.figure(f"log-probabilities of {rows} tokens, {name}", value, unit)


async def _clear(running: Any) -> None:
    """Drop the cached prefixes, so that each way computes all prompts."""
    await running._llm.reset_prefix_cache()


def _processor_s(running: Any) -> tuple[float, float]:
    """Return the processor seconds of the engine's process and of this one."""
    return tuple(sum(psutil.Process(pid).cpu_times()[:2]) for pid in (running.pid, None))


async def _bare(report: Report, running: Any) -> None:
    """Report vLLM's rate without log-probabilities and with one message at a turn's end."""
    from vllm import SamplingParams
    from vllm.inputs.engine import tokens_input
    from vllm.sampling_params import RequestOutputKind

    sizes = report.sizes
    await running._llm.collective_rpc("rate_levers", args=levers(PLAIN))

    async def one(name: str, prompt: list[int], logprobs: int | None) -> None:
        sampling = SamplingParams(
            max_tokens=sizes.new,
            ignore_eos=True,
            detokenize=False,
            logprobs=logprobs,
            flat_logprobs=True,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        async for _ in running._llm.generate(tokens_input(prompt), sampling, name):
            pass

    for words, logprobs in (("without log-probabilities", None), ("with them", 0)):
        await _clear(running)
        prompts, began = engine.prompts(report, sizes.turns, 3), time.monotonic()
        await asyncio.gather(
            *(one(f"{words} {i}", prompt, logprobs) for i, prompt in enumerate(prompts))
        )
        rate = sizes.turns * sizes.new / (time.monotonic() - began)
        report.figure(f"{sizes.turns} turns, final outputs only, {words}", rate, "token/s")


CHECKS = (
    Check(
        "rate",
        "what bounds many turns at once: each lever apart, and the parts of a step",
        rate,
        {"cuda": GPU, "cpu": CPU},
        200.0,
        "the engine's own words are in the log; VLLM_LOGGING_LEVEL=INFO says more",
    ),
)
