"""The users of an online server in a check: a closed loop over HTTP, and the latencies that they see."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import aiohttp
import numpy as np

from tests.gpu.frame import Report

TIMEOUT_S, STOP_S = 60.0, 5.0


class Users:
    """Concurrent users of `server`, of which each sends a request, and pauses as long as it took."""

    def __init__(self, report: Report, server: Any, model: str, vocabulary: int) -> None:
        self._report, self._server, self._model = report, server, model
        self._vocabulary = vocabulary
        self.took: list[float] = []  # seconds of each request
        self.ttft: list[float] = []
        self.tpot: list[float] = []
        self.refused: list[str] = []
        self.tasks: list[asyncio.Task] = []

    def begin(self) -> None:
        self._client = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=TIMEOUT_S))
        users = range(self._report.sizes.clients)
        self.tasks = [asyncio.create_task(self._user(number)) for number in users]

    async def end(self) -> None:
        if not self.tasks:
            return
        for task in self.tasks:
            task.cancel()
        await asyncio.wait(self.tasks, timeout=STOP_S)
        self.tasks = []
        await self._client.close()

    def forget(self) -> None:
        """Begin a phase: its latencies are those of the requests that end in it."""
        self.ttft, self.tpot = [], []

    def figures(self, phase: str, alone: tuple[float, ...] = ()) -> tuple[float, ...]:
        """Report the latencies of a phase; return them in the order of serving.online.slo's keys.
        `alone` are those of S alone."""
        found = []
        for name, values in (("TTFT", self.ttft), ("TPOT", self.tpot)):
            for percent in (50, 99):
                value = float(np.percentile(values, percent)) if values else float("inf")
                self._report.figure(f"S {phase}: {name} P{percent}", 1e3 * value, "ms")
                if alone:
                    share = value / alone[len(found)]
                    self._report.figure(f"S {phase}: {name} P{percent}", share, "of alone")
                found.append(value)
        return tuple(found)

    async def _user(self, number: int) -> None:
        dice, (prompt, new) = np.random.default_rng(1000 + number), self._report.sizes.request
        body = {"model": self._model, "max_tokens": new, "ignore_eos": True, "stream": True}
        while True:
            body["prompt"] = dice.integers(0, self._vocabulary, prompt).tolist()
            began, chunks, last = time.monotonic(), [], b""
            url = f"{self._server.url}/v1/completions"
            async with self._client.post(url, json=body) as answer:
                async for line in answer.content:
                    if line.startswith(b"data: {"):
                        chunks.append(time.monotonic())
                        last = line
            if answer.status != 200 or b'"finish_reason":"length"' not in last:
                self.refused.append(f"{answer.status}: {last[:200].decode(errors='replace')}")
            else:
                self.ttft.append(chunks[0] - began)
                self.tpot.append((chunks[-1] - chunks[0]) / max(1, new - 1))
            self.took.append(time.monotonic() - began)
            await asyncio.sleep(self.took[-1])
