"""Measure tokens per engine step and rollout time with and without drafts, on two engines in turn.

    python scripts/drafts/bench_drafts.py work=calls,text concurrent=1,8,16 rounds=3

`work`: calls (SmolLM2 with the calculator, two turns), text (SmolLM2, stories of 96 tokens), noise
(stories by the tiny model at temperature 2, which repeats little). Trajectories come in groups of
16 with the same prompt. Two engines of one thread alternate, of which one has rollout/draft=group.
Prints a line of JSON a round, then medians with extremes: tokens per step, and how much faster the
same tokens are generated with drafts, in wall time and in CPU time of the engine's process.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import msgspec
import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from rose import protocol as p
from rose.agent.chat import ChatFormat
from rose.agent.envs import build
from rose.agent.loop import run_trajectory
from rose.config import Config
from rose.engine import start
from rose.engine.vllm_engine import Engine
from rose.models import resolve
from scripts.csv_tables import middle, show
from scripts.harness import configured, cpu_s, keyed, listed, turn

GROUP = 16
STORY = "Write a short story about a lighthouse keeper who finds a letter in a bottle."
STORY_TOKENS = 96
SMOLLM = 8, "+experiment=smollm"
# The least number of trajectories in a round, and the override, of each work.
WORKS = {"calls": SMOLLM, "text": SMOLLM, "noise": (64, "rollout.max_sequences=16")}


class Round(NamedTuple):
    tokens: int
    steps: int
    drafted: int
    accepted: int
    seconds: float
    cpu_s: float  # CPU seconds of the engine's process


class Bench:
    """A workload on an engine."""

    def __init__(self, config: Config, engine: Engine, work: str) -> None:
        self.config, self.engine, self.work = config, engine, work
        self.chat = ChatFormat.of(resolve(config.model), config.model)

    async def run(self, seed: int, concurrent: int, trajectories: int) -> Round:
        """Run trajectories in groups that the engine has not seen, `concurrent` at once."""
        places, before, began = asyncio.Semaphore(concurrent), self.engine.stats(), time.time()
        process = psutil.Process(self.engine.pid)
        computed = cpu_s(process)

        async def one(index: int) -> None:
            group = f"g{seed}-{index // GROUP}"
            async with places:
                await self._trajectory(group, index % GROUP, seed + index // GROUP)

        await asyncio.gather(*(one(i) for i in range(trajectories)))
        after, seconds = self.engine.stats(), time.time() - began
        names = ("generated_tokens", "steps", "drafted", "accepted")
        counts = (getattr(after, n) - getattr(before, n) for n in names)
        return Round(*counts, seconds, cpu_s(process) - computed)

    async def _trajectory(self, group: str, index: int, seed: int) -> None:
        heat = 2.0 if self.work == "noise" else 1.0
        sampling = p.Sampling(max_new_tokens=STORY_TOKENS, temperature=heat)
        name = f"{group}.{index}"
        if self.work != "calls":
            tokens = p.pack_tokens(self.chat.start([{"role": "user", "content": STORY}], []))
            asked = p.TurnRequest(f"{name}.t0", name, group, p.Phase.TRAIN, tokens, sampling)
            await turn(self.engine, asked)
            return
        limits = self.config.env
        begin = p.StartTrajectory(name, group, p.Phase.TRAIN, limits.name, seed, None)
        ask, context = partial(turn, self.engine), self.config.model.max_context
        rest = (ask, limits, "env", context, sampling, time.time)
        await run_trajectory(begin, build(limits), self.chat, *rest)


async def measure(work: str, concurrent: list[int], rounds: int) -> list[dict[str, Any]]:
    """Return a row of the table for each number of concurrent turns."""
    least, override = WORKS[work]
    config = configured(override, "rollout.threads=1", "rollout/draft=group")
    none = msgspec.structs.replace(config.rollout.draft, method="none")
    benches = {}
    for at, draft in enumerate((none, config.rollout.draft)):
        rollout = msgspec.structs.replace(config.rollout, draft=draft)
        engine = await Engine.start(resolve(config.model), rollout, config.model, seed=at)
        bench = benches[draft.method] = Bench(config, engine, work)
        # A warm-up, and steps that the adaptive gate learns from.
        await bench.run(10_000 * (at + 1), GROUP, GROUP)
    rows = []
    for each in concurrent:
        found: dict[str, list[Round]] = {name: [] for name in benches}
        for index in range(rounds):
            for name in list(benches) if index % 2 else list(benches)[::-1]:
                seed = 1000 * each + 10 * index
                got = await benches[name].run(seed, each, max(least, 2 * each))
                found[name].append(got)
                line = {"work": work, "draft": name, "concurrent": each} | got._asdict()
                print(json.dumps(line), flush=True)
        drafts = columns(found["none"], found[config.rollout.draft.method])
        rows.append({"work": work, "concurrent": each} | drafts)
    for bench in benches.values():
        await bench.engine.shutdown()
    return rows


def columns(without: list[Round], drafted: list[Round]) -> dict[str, Any]:
    """Return tokens per step without and with drafts, their ratio, the share of drafts accepted,
    and how much faster the same tokens were generated (by wall time and by CPU time)."""
    plain, drafts = (median(r.tokens / r.steps for r in runs) for runs in (without, drafted))
    share = sum(r.accepted for r in drafted) / max(1, sum(r.drafted for r in drafted))
    row: dict[str, Any] = {"tokens/step without": plain, "with": drafts, "ratio": drafts / plain}
    row["accepted"] = share
    for name, took in (("faster", "seconds"), ("by CPU", "cpu_s")):
        each = ([getattr(r, took) / r.tokens for r in runs] for runs in (without, drafted))
        row[name] = middle([a / b for a, b in zip(*each, strict=True)])
    return row


def main() -> None:
    given = keyed(sys.argv[1:], __doc__, work="", concurrent="1,8,16", rounds=3)
    concurrent = [int(each) for each in given["concurrent"].split(",")]
    for name, value in start.environment(gpus=False, threads=1).items():
        os.environ.setdefault(name, value)
    start.preload()
    works = listed("work", given["work"], WORKS)
    made = [asyncio.run(measure(work, concurrent, given["rounds"])) for work in works]
    show([row for rows in made for row in rows], f"medians of {given['rounds']} rounds")


if __name__ == "__main__":
    main()
