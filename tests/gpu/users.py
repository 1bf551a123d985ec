"""The two sides of a shared device in a check: users of an online server S, as a closed loop over
HTTP, and the turns of a rollout engine R."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterable
from typing import Any

import aiohttp
import numpy as np

from scripts.lending.bench_coserving_client import Request, send
from tests.gpu.frame import Report
from tests.gpu.model import shape_of

LOOK_S, TIMEOUT_S, STOP_S = 0.02, 60.0, 5.0


async def until(
    condition: Callable[[], object],
    seconds: float,
    what: Callable[[], str],
    tasks: Iterable[asyncio.Task] = (),
    look_s: float = LOOK_S,
) -> float:
    """Wait until `condition` holds and return the seconds. Raises `RuntimeError` naming `what` after
    `seconds`, and the error of a task that failed."""
    began = time.monotonic()
    while not condition():
        for task in tasks:
            if task.done():
                task.result()
        if time.monotonic() - began > seconds:
            raise RuntimeError(f"waited {seconds:g} s for {what()}")
        await asyncio.sleep(look_s)
    return time.monotonic() - began


class Loops:
    """Tasks that each run `_loop(number)` until `end`."""

    def __init__(self, report: Report) -> None:
        self._report, self._vocabulary = report, shape_of(report).vocab
        self.tasks: list[asyncio.Task] = []

    def begin(self, count: int) -> None:
        self.tasks = [asyncio.create_task(self._loop(number)) for number in range(count)]

    async def end(self) -> None:
        for task in self.tasks:
            task.cancel()
        if self.tasks:
            await asyncio.wait(self.tasks, timeout=STOP_S)
        self.tasks = []

    async def _loop(self, number: int) -> None:
        raise NotImplementedError


class Users(Loops):
    """Concurrent users of `server`, of which each sends a request, and pauses as long as it took."""

    def __init__(self, report: Report, server: Any, model: str) -> None:
        super().__init__(report)
        self._server, self._model = server, model
        self.took: list[float] = []  # seconds of each request
        self.refused: list[str] = []
        self.forget()

    def begin(self, count: int) -> None:
        self._client = aiohttp.ClientSession()
        super().begin(count)

    async def end(self) -> None:
        if self.tasks:
            await super().end()
            await self._client.close()

    def forget(self) -> None:
        """Begin a phase: its latencies are those of the requests that end in it."""
        self._ttft: list[float] = []
        self._tpot: list[float] = []

    def figures(self, phase: str, alone: tuple[float, ...] = ()) -> tuple[float, ...]:
        """Report the latencies of a phase; return them in the order of serving.online.slo's keys.
        `alone` are those of S alone."""
        found = []
        for name, values in (("TTFT", self._ttft), ("TPOT", self._tpot)):
            for percent in (50, 99):
                value = float(np.percentile(values, percent)) if values else math.inf
                self._report.figure(f"S {phase}: {name} P{percent}", 1e3 * value, "ms")
                if alone:
                    share = value / alone[len(found)]
                    self._report.figure(f"S {phase}: {name} P{percent}", share, "of alone")
                found.append(value)
        return tuple(found)

    async def _loop(self, number: int) -> None:
        dice, (prompt, new) = np.random.default_rng(1000 + number), self._report.sizes.request
        while True:
            one = Request(0.0, dice.integers(0, self._vocabulary, prompt).tolist(), new)
            place = self._client, f"{self._server.url}/v1/completions", self._model
            await send(*place, one, time.monotonic(), TIMEOUT_S)
            if one.done:
                self._ttft.append(one.ttft)
                self._tpot.append(one.tpot)
            else:
                self.refused.append(one.why)
            self.took.append(one.ended)
            await asyncio.sleep(one.ended)


class Rollouts(Loops):
    """Concurrent turns of the engine R. An aborted turn is not continued here."""

    def __init__(self, report: Report, engine: Any) -> None:
        super().__init__(report)
        self.engine = engine
        self.made = self.evicted = 0  # tokens, and aborted turns
        self.rests = False  # R is inactive or about to be, so no turn starts

    async def rate(self, seconds: float) -> float:
        """Return the tokens a second of the next `seconds`."""
        before, began = self.made, time.monotonic()
        await until(lambda: time.monotonic() - began > seconds, math.inf, str, self.tasks)
        return (self.made - before) / (time.monotonic() - began)

    async def _loop(self, number: int) -> None:
        from rose import protocol

        dice, (prompt, new) = np.random.default_rng(number), self._report.sizes.turn
        for at in range(10**6):
            while self.rests:
                await asyncio.sleep(LOOK_S)
            tokens = protocol.pack_tokens(dice.integers(0, self._vocabulary, prompt))
            sampling, finish = protocol.Sampling(max_new_tokens=new), None
            async for chunk in self.engine.generate(f"r{number}.{at}", tokens, sampling):
                self.made, finish = self.made + len(chunk.tokens), chunk.finish
            if finish is protocol.FinishReason.ABORT:
                self.evicted += 1
                await asyncio.sleep(LOOK_S)
