"""Measure the engine steps of two engines on this device, alone and beside each other.

Clients in a closed loop send prompts of random tokens, with log-uniform lengths, and request a few
tokens for each. So steps with every mixture of prefill and decodes occur. The engines' schedulers
record each step (rose/parts/lending/vllm/steps.py). HTTP and meaningful text aren't needed, because
neither changes a step.
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

from rose.engine import start
from rose.engine.start import EngineError
from rose.parts.lending.rules.predictor import Predictor, Work
from rose.parts.lending.vllm import priority
from rose.parts.lending.vllm.steps import STEPS

# Deadline of one request of the warm-up or of `drain`, in seconds. On a device that is fast enough
# to be lent, a request takes far less.
REQUEST_S = 120.0
PROBES = (16, 64, 256, 1024, 4096, 16384)  # prompt tokens of the warm-up's requests, in order
# The warm-up ends after a request that takes over this share of the seconds for one engine alone.
PROBE_SHARE = 0.06
# Least and most tokens generated for a request. With one client, about a tenth of the steps have
# prefill, with 8 clients half of them.
ANSWER = (4, 24)
# Both engines are measured in this many pairs of time slices: one without rollouts, then one with.
# They alternate so that slow drifts cancel.
SLICES = 12
# An online step counts as beside rollouts if rollout steps ran for at least this share of its time.
BESIDE = 0.5
# An online step counts as alone if rollout steps ran for at most this share of its time.
ALONE = 0.01
FEWEST = 20  # least number of online steps of either kind; a P99 of fewer says nothing
STEP_SHARE = 0.125  # largest share of a slice that one step may take
LEAST_HOLD = 0.01  # least hold_p99 in a profile; a smaller one can't be measured with so few steps
CLIENTS = 4  # clients of each engine while both run
# Most clients of a rollout engine on a GPU. It has many turns, and large steps delay the online
# engine more than small ones.
TURNS = 64
# A client pauses between its requests for this multiple of a request's time. An online engine that
# is never idle would leave no time for steps of an engine of idle priority on the same core.
PAUSE = 3.0
STOP_S = 10.0  # seconds for an orderly end of clients and engines


class Side(NamedTuple):
    """An engine to be measured."""

    name: str  # "online" or "rollout"
    args: dict[str, Any]  # arguments for vLLM's AsyncEngineArgs
    environment: dict[str, str]  # variables of the engine's process, in addition to this one's
    vocabulary: int
    logprobs: int | None  # vLLM's SamplingParams.logprobs, as this side's clients will request


class Step(NamedTuple):
    """A measured engine step."""

    began: float  # CLOCK_MONOTONIC, seconds
    ended: float
    work: Work

    @property
    def seconds(self) -> float:
        return self.ended - self.began


class Measured:
    """An engine process that records its steps in the file `log`. Creating one blocks until the
    engine serves. Raises `EngineError`."""

    def __init__(self, side: Side, gpus: bool, log: Path, seed: int = 0) -> None:
        self.side, self._log, self._read = side, log, 0
        self._dice = random.Random(seed)
        self._serial = itertools.count()
        here = dict(os.environ)
        os.environ.update(side.environment | {STEPS: str(log)})
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
        """Send prompts of growing length until one takes over PROBE_SHARE of `seconds`. Its length
        then bounds the prompts of later traffic. The first prompt's time doesn't count, because
        engines compile and allocate at first use. Raises `EngineError`."""
        longest, tokens, took = max(2, min(self._longest, self._kv_tokens // 2)), 0, 0.0
        for probe in PROBES:
            if tokens == longest or tokens > PROBES[0] and took > PROBE_SHARE * seconds:
                break
            tokens = min(probe, longest)
            took = await self._timed(tokens, ANSWER[0])
        self._longest = tokens

    async def sweep(self, seconds: float) -> None:
        """Send traffic of 1, 2, 4, ... clients, up to the engine's most sequences, for `seconds` in
        all. Raises `EngineError`."""
        levels = [2**n for n in range(self._most.bit_length()) if 2**n < self._most] + [self._most]
        for clients in levels:
            await self.traffic(clients, seconds / len(levels))

    async def traffic(
        self, clients: int, seconds: float, longest: int | None = None, pause: float = 0.0
    ) -> None:
        """Send traffic for `seconds`, then abort running requests. Prompts have up to `longest`
        tokens. Clients pause for `pause` times the last request's time. Raises `EngineError`."""
        longest = max(
            2, min(longest or self._longest, self._longest, self._kv_tokens // (2 * clients))
        )
        tasks = [
            asyncio.create_task(self._client(longest, pause))
            for _ in range(min(clients, self._most))
        ]
        done, _ = await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks, timeout=STOP_S)
        for task in done:
            raise task.exception()

    async def drain(self) -> None:
        """Send a short request and wait for it, and so for the end of a step with aborted requests.
        At low priority such a step can take very long. Raises `EngineError`."""
        await self._timed(2, 1)

    async def _timed(self, prompt: int, answer: int) -> float:
        """Send one request; return its seconds. Raises `EngineError` after `REQUEST_S`."""
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

    async def _client(self, longest: int, pause: float) -> None:
        """Send random requests one after the other, until cancelled."""
        while True:
            began = time.monotonic()
            tokens = round(math.exp(self._dice.uniform(math.log(2), math.log(longest))))
            await self._request(tokens, self._dice.randint(*ANSWER))
            await asyncio.sleep(pause * (time.monotonic() - began))

    async def _request(self, prompt: int, answer: int) -> None:
        """Send a request with a random prompt, and wait for all of its answer."""
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
        # Random tokens never match a cached prefix.
        tokens = [self._dice.randrange(self.side.vocabulary) for _ in range(prompt)]
        try:
            async for _ in self._llm.generate(
                tokens_input(tokens), params, f"{self.side.name}-{next(self._serial)}"
            ):
                pass
        except EngineDeadError as error:
            raise EngineError(f"the {self.side.name} engine died while it was measured") from error

    def steps(self) -> list[Step]:
        """Return the steps recorded since the last call."""
        with self._log.open("rb") as file:
            file.seek(self._read)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._read += len(whole)
        return [_step(json.loads(line)) for line in whole.splitlines()]

    def lower_priority(self) -> None:
        """Lower the priority of the engine's threads, as a co-serving rollout engine does."""
        priority.lower_priority(self.process.pid, priority.may_raise_again())

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
    """Measure an engine alone for `seconds`; return the fitted predictor of its step times. Raises
    `EngineError` when there were too few steps for a fit."""
    await engine.warm_up(seconds)
    engine.steps()  # discards the warm-up's steps
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
    turns: int = CLIENTS,
) -> dict[str, float]:
    """Measure the `interference` of rollouts, of `turns` concurrent turns, with steady online
    traffic. Takes up to twice `seconds` if there are too few steps. Raises `EngineError`."""
    slice_s = seconds / SLICES / 2
    longest = _longest_within(slice_s * STEP_SHARE, CLIENTS, predictor)
    rollout_longest = _longest_within(slice_s * STEP_SHARE, turns, rollout_predictor)
    steps: tuple[list[Step], list[Step]] = ([], [])
    for engine in (online, rollout):
        engine.steps()  # discards earlier steps
    for pair in range(2 * SLICES):
        await online.traffic(CLIENTS, slice_s, longest, PAUSE)
        await asyncio.gather(
            online.traffic(CLIENTS, slice_s, longest, PAUSE),
            rollout.traffic(turns, slice_s, rollout_longest),
        )
        await rollout.drain()
        for collected, engine in zip(steps, (online, rollout), strict=False):
            collected += engine.steps()
        if pair >= SLICES - 1 and min(map(len, _apart_and_beside(*steps))) >= FEWEST:
            break
    return interference(*steps, predictor, rollout_predictor)


def _longest_within(seconds: float, clients: int, predictor: Predictor) -> int:
    """Return the longest prompt, a power of 2 in tokens, of which `clients` fit into a step of
    `seconds`. A long step would run on into the next slice, although its requests are aborted."""
    tokens = 2
    while (
        tokens < PROBES[-1]
        and predictor.seconds(Work(((2 * tokens, 0),) * clients, 0, 0)) <= seconds
    ):
        tokens *= 2
    return tokens


def interference(
    online: list[Step], rollout: list[Step], predictor: Predictor, rollout_predictor: Predictor
) -> dict[str, float]:
    """Compute how much rollout steps and online steps delay each other.

    - hold_p99, hold_mean: how much longer an online step gets, as a share of the time in which
      rollout steps overlap it: (r' - r) / (r' x overlap). r and r' are measured / predicted times
      of online steps alone and beside rollouts, at their P99 and on average.
    - progress: the work that rollout steps did while online steps ran, as a share of the work that
      they would have done alone in this time.

    r and r' are compared at the same quantile, so the noise that both have cancels. Raises
    `EngineError` with fewer than FEWEST online steps of either kind.
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
    """Return the online steps alone and those beside rollout steps, as (overlap share, step)."""
    begins = [step.began for step in rollout]
    shares = [(_overlap(step, rollout, begins), step) for step in online]
    apart = [(share, step) for share, step in shares if share <= ALONE]
    return apart, [(share, step) for share, step in shares if share >= BESIDE]


def _overlap(step: Step, others: list[Step], begins: list[float]) -> float:
    """Return the share of the step's time during which one of `others` ran. `others` don't overlap
    each other and are sorted by their beginnings, `begins`."""
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
