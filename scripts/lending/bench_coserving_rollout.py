"""Run R's side of bench_coserving.py: a closed loop of turns, which keeps the engine busy.

    python scripts/lending/bench_coserving_rollout.py engine JSON   # rose.engine.vllm_engine.Engine, as a borrowed rank has it
    python scripts/lending/bench_coserving_rollout.py http JSON     # turns at low priority to a server that serves both

Orders (start, stop, count) arrive as lines of JSON on stdin, answers go to stdout. Turns of one
group share their prompt, as samples of one task do.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import msgspec
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from rose import protocol
from rose.parts.lending.vllm import device, priority
from scripts.harness import answers, configured
from scripts.lending.bench_coserving_client import WORDS

# vLLM's priority of turns on a server that serves both sides. Users' requests have 0 and go first.
PRIORITY = 1000
# Seconds until a new turn follows one that was aborted, and would continue on another engine.
ELSEWHERE_S = 0.25


def endless(job: dict) -> Iterator[tuple[np.ndarray, int]]:
    """Yield turns in groups, each a prompt (int32 array) and a number of new tokens."""
    draw = np.random.default_rng(job["seed"])
    while True:
        prompt = draw.integers(1, WORDS, draw.integers(64, 257)).astype(np.int32)
        for _ in range(job["group"]):
            yield prompt, int(draw.integers(32, 129))


class Loop:
    """A loop that keeps `concurrency` turns running. `_turn` runs one and counts its tokens."""

    def __init__(self, job: dict) -> None:
        self._job, self._turns, self._tasks = job, endless(job), []
        self.count = {"made": 0, "evicted": 0, "wasted": 0}

    def start(self) -> None:
        self._tasks = [asyncio.create_task(self._work()) for _ in range(self._job["concurrency"])]

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _work(self) -> None:
        while True:
            try:
                ended = await self._turn(*next(self._turns))
            except Exception as error:
                print(f"a turn failed: {error!r}", file=sys.stderr, flush=True)
                ended = False
            if not ended:
                await asyncio.sleep(ELSEWHERE_S)

    async def _turn(self, prompt: np.ndarray, new: int) -> bool:
        """Run one turn. True if it ended by itself, without being aborted."""
        raise NotImplementedError


class EngineLoop(Loop):
    async def open(self) -> dict:
        from rose.engine.vllm_engine import Engine

        job = self._job
        config = configured("trainer.micro_batch_tokens=4096", *job["overrides"])
        rollout = msgspec.structs.replace(config.rollout, engine_args=job["engine_args"])
        here = device.here()
        if here is not None and here.serving.lending.priority == "idle":
            # A borrowed rank does the same: rose.parts.lending.rank.member.
            os.nice(priority.NICE)
        self._number = 0
        self._engine = await Engine.start(job["model"], rollout, config.model, seed=job["seed"])
        return {"engine": self._engine.pid}

    async def _turn(self, prompt: np.ndarray, new: int) -> bool:
        self._number += 1
        name, made, finish = f"turn{self._number}", 0, None
        request = name, protocol.pack_tokens(prompt), protocol.Sampling(max_new_tokens=new)
        try:
            async for chunk in self._engine.generate(*request):
                made, finish = made + len(chunk.tokens), chunk.finish
                self.count["made"] += len(chunk.tokens)
        except asyncio.CancelledError:
            await self._engine.abort(name)
            raise
        evicted = finish is protocol.FinishReason.ABORT
        self.count["evicted"] += evicted
        self.count["wasted"] += evicted * (len(prompt) + made)
        return not evicted


class HttpLoop(Loop):
    async def open(self) -> dict:
        timeout, connector = aiohttp.ClientTimeout(total=None), aiohttp.TCPConnector(limit=0)
        self._session = aiohttp.ClientSession(timeout=timeout, connector=connector)
        return {"engine": None}

    async def _turn(self, prompt: np.ndarray, new: int) -> bool:
        body = {"model": self._job["served"], "prompt": prompt.tolist(), "max_tokens": new}
        body |= {"ignore_eos": True, "priority": PRIORITY, "temperature": 1.0}
        async with self._session.post(f"{self._job['url']}/v1/completions", json=body) as response:
            said = await response.json()
        if response.status != 200:
            raise RuntimeError(f"status {response.status}: {str(said)[:300]}")
        self.count["made"] += said["usage"]["completion_tokens"]
        return True


async def serve(loop: Loop, say) -> None:
    say(await loop.open())
    while line := await asyncio.to_thread(sys.stdin.readline):
        match json.loads(line)["do"]:
            case "start":
                loop.start()
            case "stop":
                await loop.stop()
        say(loop.count)


def main() -> None:
    say, (kind, job) = answers(), sys.argv[1:]
    loop = {"engine": EngineLoop, "http": HttpLoop}[kind](json.loads(job))
    asyncio.run(serve(loop, say))


if __name__ == "__main__":
    main()
