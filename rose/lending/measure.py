"""How long the steps of two engines take on this device, alone and beside each other, under made
traffic.

Clients in a closed loop send prompts of random tokens, lengths log-uniform, and take a few tokens
of each, so that steps of every mixture of prefill and decodes come by themselves. The engines' own
schedulers write down each step (rose/lending/vllm/steps.py). Left out: HTTP, and tokens that mean
something: neither is part of a step.
"""

from __future__ import annotations

import asyncio
import bisect
import itertools
import json
import math
import os
import random
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from rose.engine import plugin, start
from rose.engine.start import EngineError
from rose.lending.rules.predictor import Predictor, Work
from rose.lending.vllm import priority

REQUEST_S = 120.0  # one request of a probe; nothing that can be served beside others takes so long
# tokens of the first prompts, as far as one takes PROBE_SHARE of the time
PROBES = (16, 64, 256, 1024, 4096, 16384)
PROBE_SHARE = 0.06
# tokens made per request: about a tenth of the steps have prefill with one client, half with 8
ANSWER = (4, 24)
# of the time with both engines: by turns with rollouts and without, so that slow drifts cancel
SLICES = 12
# an online step with rollout steps for more, or less, of its time counts as either
BESIDE, ALONE = (0.5, 0.01)
FEWEST = 20  # steps of both kinds, or nothing can be said of a P99
STEP_SHARE = 0.125  # of a slice, that a step in it may take
LEAST_HOLD = 0.01  # less can't be told from none with so few steps
CLIENTS = 4  # of each engine while both run
# times a request's own time between a client's requests then: an online engine that is never idle
# would leave an engine of idle priority on the same core no step to be measured beside
REST = 3.0
STOP_S = 10.0


class Side(NamedTuple):
    """An engine to be measured."""

    name: str  # "online" or "rollout"
    args: dict[str, Any]  # of vLLM's AsyncEngineArgs
    environment: dict[str, str]  # of its process, besides ours
    vocabulary: int
    logprobs: int | None  # of each token, as it will be asked for


class Step(NamedTuple):
    began: float  # CLOCK_MONOTONIC, seconds
    ended: float
    work: Work

    @property
    def seconds(self) -> float:
        return self.ended - self.began


class Measured:
    """One engine process; its steps land in `log`. Blocks until it serves. Raises `EngineError`."""

    def __init__(self, side: Side, gpus: bool, log: Path, seed: int = 0) -> None:
        self.side, self._log, self._read = side, log, 0
        self._dice = random.Random(seed)
        self._serial = itertools.count()
        here = dict(os.environ)
        os.environ.update(side.environment | {plugin.STEPS: str(log)})
        try:
            self._llm, _ = start.build(side.args, gpus)
        except Exception as error:
            raise EngineError(
                f"the {side.name} engine of {side.args['model']} did not start: {error}"
            ) from error
        finally:
            os.environ.clear()
            os.environ.update(here)
        config = self._llm.vllm_config
        self._longest = config.model_config.max_model_len - ANSWER[1] - 1
        self._most = config.scheduler_config.max_num_seqs
        cache = config.cache_config
        self._kv_tokens = cache.kv_cache_size_tokens or cache.num_gpu_blocks * cache.block_size

    @property
    def process(self):
        return self._llm.engine_core.resources.engine_manager.processes[0]

    async def warm_up(self, seconds: float) -> None:
        """One prompt after the other, each longer, until one takes longer than PROBE_SHARE of
        `seconds`: no longer ones are sent from then on. The first is not judged, as much is made at
        first use. Raises `EngineError`."""
        longest, tokens, took = max(2, min(self._longest, self._kv_tokens // 2)), 0, 0.0
        for probe in PROBES:
            if tokens == longest or tokens > PROBES[0] and took > PROBE_SHARE * seconds:
                break
            tokens = min(probe, longest)
            took = await self._timed(tokens, ANSWER[0])
        self._longest = tokens

    async def sweep(self, seconds: float) -> None:
        """Traffic of 1, 2, 4, ... clients, up to the engine's sequences. Raises `EngineError`."""
        levels = [2**n for n in range(self._most.bit_length()) if 2**n < self._most] + [self._most]
        for clients in levels:
            await self.traffic(clients, seconds / len(levels))

    async def traffic(
        self, clients: int, seconds: float, longest: int | None = None, rest: float = 0.0
    ) -> None:
        """For so long, with prompts up to `longest`; what runs then is aborted. `rest`: of each
        client after a request, times the request's own time. Raises `EngineError`."""
        longest = max(
            2, min(longest or self._longest, self._longest, self._kv_tokens // (2 * clients))
        )
        tasks = [
            asyncio.create_task(self._client(longest, rest))
            for _ in range(min(clients, self._most))
        ]
        done, _ = await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks, timeout=STOP_S)
        for task in done:
            raise task.exception()

    async def through(self) -> None:
        """Until a short request went through: the step of what was aborted before has ended, which
        beside others may take an engine of low priority any time. Raises `EngineError`."""
        await self._timed(2, 1)

    async def _timed(self, prompt: int, answer: int) -> float:
        """Seconds of one request. Raises `EngineError`."""
        began = time.monotonic()
        try:
            async with asyncio.timeout(REQUEST_S):
                await self._request(prompt, answer)
        except TimeoutError:
            raise EngineError(
                f"the {self.side.name} engine took over {REQUEST_S:g} s for a prompt of {prompt} "
                "tokens"
            ) from None
        return time.monotonic() - began

    async def _client(self, longest: int, rest: float) -> None:
        while True:
            began = time.monotonic()
            tokens = round(math.exp(self._dice.uniform(math.log(2), math.log(longest))))
            await self._request(tokens, self._dice.randint(*ANSWER))
            await asyncio.sleep(rest * (time.monotonic() - began))

    async def _request(self, prompt: int, answer: int) -> None:
        from vllm import SamplingParams
        from vllm.inputs.engine import tokens_input
        from vllm.sampling_params import RequestOutputKind
        from vllm.v1.engine.exceptions import EngineDeadError

        params = SamplingParams(
            max_tokens=answer,
            temperature=1.0,
            ignore_eos=True,
            detokenize=False,
            logprobs=self.side.logprobs,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        # no prefix is ever cached
        tokens = [self._dice.randrange(self.side.vocabulary) for _ in range(prompt)]
        try:
            async for _ in self._llm.generate(
                tokens_input(tokens), params, f"{self.side.name}-{next(self._serial)}"
            ):
                pass
        except EngineDeadError as error:
            raise EngineError(f"the {self.side.name} engine died while it was measured") from error

    def steps(self) -> list[Step]:
        """Those written since the last call."""
        with self._log.open("rb") as file:
            file.seek(self._read)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._read += len(whole)
        return [_step(json.loads(line)) for line in whole.splitlines()]

    def lower_priority(self) -> None:
        """As R's threads do beside S."""
        priority.lower_priority(self.process.pid, priority.may_return())

    def shutdown(self) -> None:
        process = self.process
        if self._llm.output_handler is not None:
            self._llm.output_handler.cancel()
        self._llm.shutdown(STOP_S)
        process.join(STOP_S)
        if process.exitcode is None:
            process.kill()


def _step(found: dict[str, Any]) -> Step:
    prefill = tuple((new, before) for new, before in found["prefill"])
    work = Work(prefill, found["decodes"], found["decode_context"])
    return Step(found["began"], found["ended"], work)


async def alone(engine: Measured, seconds: float) -> Predictor:
    """Raises `EngineError` when too few steps came for a fit."""
    await engine.warm_up(seconds)
    engine.steps()
    await engine.sweep(seconds)
    samples = [(step.work, step.seconds) for step in engine.steps()]
    try:
        return Predictor.fit(samples)
    except ValueError as error:
        raise EngineError(
            f"the {engine.side.name} engine in {seconds:.3g} s: {error}; give it more with seconds="
        ) from None


async def together(
    online: Measured,
    rollout: Measured,
    predictor: Predictor,
    rollout_predictor: Predictor,
    seconds: float,
) -> dict[str, float]:
    """`interference` of steady online traffic with and without rollouts beside it. Takes up to
    twice the time when steps are too few. Raises `EngineError`."""
    slice_s = seconds / SLICES / 2
    longest, rollout_longest = (
        _longest_within(slice_s * STEP_SHARE, p) for p in (predictor, rollout_predictor)
    )
    steps: tuple[list[Step], list[Step]] = ([], [])
    for engine in (online, rollout):
        engine.steps()  # those of before
    for turn in range(2 * SLICES):
        await online.traffic(CLIENTS, slice_s, longest, REST)
        await asyncio.gather(
            online.traffic(CLIENTS, slice_s, longest, REST),
            rollout.traffic(CLIENTS, slice_s, rollout_longest),
        )
        await rollout.through()
        for all_of_it, engine in zip(steps, (online, rollout), strict=False):
            all_of_it += engine.steps()
        if turn >= SLICES - 1 and min(map(len, _apart_and_beside(*steps))) >= FEWEST:
            break
    return interference(*steps, predictor, rollout_predictor)


def _longest_within(seconds: float, predictor: Predictor) -> int:
    """Tokens of the longest prompt, a power of 2, that CLIENTS may send at once for a step of so
    long: an aborted request's step runs on into the next slice."""
    tokens = 2
    while (
        tokens < PROBES[-1]
        and predictor.seconds(Work(((2 * tokens, 0),) * CLIENTS, 0, 0)) <= seconds
    ):
        tokens *= 2
    return tokens


def interference(
    online: list[Step], rollout: list[Step], predictor: Predictor, rollout_predictor: Predictor
) -> dict[str, float]:
    """hold_p99, hold_mean: the share of the time spent beside a rollout step by which an online
    step is longer than alone, (r' - r) / (r' x overlap) with r and r' the measured / predicted
    times of online steps alone and beside rollouts, at their P99 and on average. progress: what
    rollouts did meanwhile, as a share of what they do alone.

    Comparing the two distributions at the same quantile leaves out the noise that both have, which
    is in the predictor's margin already. Raises `EngineError` with fewer than FEWEST steps of
    either kind.
    """
    steps_apart, steps_beside = _apart_and_beside(online, rollout)
    apart, beside = (
        sorted(step.seconds / predictor.seconds(step.work) for _, step in steps)
        for steps in (steps_apart, steps_beside)
    )
    if min(len(apart), len(beside)) < FEWEST:
        raise EngineError(
            f"{len(beside)} online steps beside rollouts and {len(apart)} alone: {FEWEST} of each "
            "are needed to know how the engines disturb each other; give it more with seconds="
        )
    overlap = _mean(share for share, _ in steps_beside)
    mean = max(0.0, (_mean(beside) - _mean(apart)) / (_mean(beside) * overlap))
    p99 = (_p99(beside) - _p99(apart)) / (_p99(beside) * overlap)
    begins = [step.began for step in online]
    overlaps = [(_overlap(step, online, begins), step) for step in rollout]
    meanwhile = sum(share * step.seconds for share, step in overlaps)
    done = sum(share * rollout_predictor.seconds(step.work) for share, step in overlaps)
    return {
        "hold_p99": max(p99, mean, LEAST_HOLD),
        "hold_mean": mean,
        "progress": done / meanwhile,
        "steps_alone": len(apart),
        "steps_beside": len(beside),
    }


def _apart_and_beside(
    online: list[Step], rollout: list[Step]
) -> tuple[list[tuple[float, Step]], ...]:
    """(share, step) of online steps with hardly any rollout step during them, and with one for most
    of their time."""
    begins = [step.began for step in rollout]
    shares = [(_overlap(step, rollout, begins), step) for step in online]
    apart = [(share, step) for share, step in shares if share <= ALONE]
    return apart, [(share, step) for share, step in shares if share >= BESIDE]


def _overlap(step: Step, others: list[Step], begins: list[float]) -> float:
    """Share of its time during which one of `others` (in order, one after the other) ran."""
    at, covered = max(0, bisect.bisect_right(begins, step.began) - 1), 0.0
    while at < len(others) and others[at].began < step.ended:
        covered += max(0.0, min(step.ended, others[at].ended) - max(step.began, others[at].began))
        at += 1
    return covered / step.seconds if step.seconds > 0 else 0.0


def _mean(values: Iterable[float]) -> float:
    values = list(values)
    return sum(values) / len(values)


def _p99(ordered: list[float]) -> float:
    return ordered[math.ceil(0.99 * len(ordered)) - 1]
