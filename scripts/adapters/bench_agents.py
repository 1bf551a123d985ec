"""Measure the cost of the gateway and of slow rewards: FrozenLake by ROSE's own loop and by agents
over HTTP, on one engine; rewards in an environment and in the pool of reward workers.

    python scripts/adapters/bench_agents.py [--parts tiny smollm2 rewards] [--agents 64] [--rounds 3]

tiny and smollm2, the models: three kinds of agent take turns on the same seeds:
    loop      ROSE's own loop
    http      the gateway with coroutines of this process as agents (raw HTTP, so that the cost is
              the gateway's and not a client library's), and again with one agent
    function  the gateway with a forked process for each trajectory, as env.args.function
Prints medians of turns/s and tokens/s, the ratio of tokens/s to the loop's, and the milliseconds of
an HTTP call beyond its turn.

rewards: three runs of launch.py, tiny model, 64 trajectories a step: without a delay; with 2 s at
the end of each trajectory inside the environment, in asyncio's own threads (`asyncio.to_thread`);
with 2 s in `reward=function`. Prints the median step after the first.
"""

from __future__ import annotations

import asyncio
import math
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY))
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")

import aiohttp

from rose import config, models
from rose import protocol as p
from rose.agent.chat import ChatFormat
from rose.agent.envs.base import Action, Step
from rose.agent.envs.frozen_lake import FrozenLake
from rose.agent.loop import run_trajectory
from rose.parts.adapters.envs.agent import Agent
from rose.parts.adapters.gateway.run import run_agent
from rose.parts.adapters.gateway.server import Gateway
from rose.parts.adapters.gateway.session import Session
from rose.reward.episode import Episode
from scripts.adapters.bench_agents_program import converse
from scripts.csv_tables import show
from scripts.harness import configured, flagged, turn
from scripts.runs import ran

NEW = 16  # new tokens of a turn
SAMPLING = p.Sampling(NEW)
# For each model: turns of a trajectory, trajectories of a round, GiB of KV cache for 64 at once.
SIZES = {"tiny": (10, 256, 0.25), "smollm2": (3, 64, 1.5)}
DELAY_S = 2.0
STEPS = 4


class Engine:
    """A turn function on an engine, which counts turns and tokens."""

    def __init__(self, engine: Any) -> None:
        self._engine, self.tokens, self.turns = engine, 0, 0

    async def __call__(self, request: p.TurnRequest) -> p.TurnResult:
        result = await turn(self._engine, request)
        self.tokens += len(p.unpack_tokens(result.tokens))
        self.turns += 1
        return result


class SlowLake(FrozenLake):
    """FrozenLake that takes `DELAY_S` to compute the reward at the end of an episode."""

    turns = 0

    async def step(self, action: Action) -> Step:
        step = await super().step(action)
        self.turns += 1
        if step.done or self.turns == SIZES["tiny"][0]:
            await asyncio.to_thread(time.sleep, DELAY_S)
        return step


def slow_score(episode: Episode) -> float:
    """Return the episode's reward after `DELAY_S`, for `reward=function`."""
    time.sleep(DELAY_S)
    return episode.reward


class Bench:
    def __init__(
        self, engine: Any, chat: ChatFormat, context: int, gateway: Gateway, turns: int
    ) -> None:
        self.engine, self.chat, self.context, self.gateway = Engine(engine), chat, context, gateway
        self.limits = config.Env("frozen_lake", {}, turns, NEW, 300.0, 1)
        os.environ["BENCH_TURNS"] = str(turns)
        program = f"{REPOSITORY}/scripts/adapters/bench_agents_program.py"
        self.agent = Agent(function=f"{program}:solve", environment=["BENCH_TURNS"])
        self.ways = {"loop": self.own_loop, "http": self.over_http, "function": self.by_process}
        self.beside: list[float] = []  # seconds of each call beyond its turn

    async def own_loop(self, start: p.StartTrajectory) -> None:
        await run_trajectory(
            start, FrozenLake(), self.chat, self.engine, self.limits, "env", self.context,
            SAMPLING, time.time,
        )  # fmt: skip

    async def over_http(self, start: p.StartTrajectory) -> None:
        turn_s = 0.0

        async def timed(request: p.TurnRequest) -> p.TurnResult:
            nonlocal turn_s
            began = time.perf_counter()
            result = await self.engine(request)
            turn_s = time.perf_counter() - began
            return result

        session = Session(start, self.chat, timed, self.limits, self.context, SAMPLING)
        self.gateway.admit(session)
        headers = {"x-api-key": session.key}
        async with aiohttp.ClientSession(headers=headers) as http:

            async def ask(body: dict) -> dict:
                began = time.perf_counter()
                async with http.post(f"{self.gateway.url}/v1/chat/completions", json=body) as got:
                    answer = await got.json()
                self.beside.append(time.perf_counter() - began - turn_s)
                return answer

            await converse(start.env_seed, self.limits.max_turns, ask)
        session.history.branches()
        self.gateway.dismiss(session)

    async def by_process(self, start: p.StartTrajectory) -> None:
        await run_agent(
            start, self.agent, self.gateway, self.chat, self.engine, self.limits, "env",
            self.context, SAMPLING, time.time,
        )  # fmt: skip

    async def run(self, play: Any, tag: str, episodes: int, agents: int) -> dict[str, float]:
        """Return turns/s, tokens/s and the median milliseconds of a call beyond its turn."""
        gate = asyncio.Semaphore(agents)
        self.engine.tokens = self.engine.turns = 0
        self.beside.clear()

        async def one(number: int) -> None:
            name = f"{tag}.{number}"
            async with gate:
                await play(p.StartTrajectory(name, tag, p.Phase.TRAIN, "", 2 * number, None))

        began = time.perf_counter()
        await asyncio.gather(*map(one, range(episodes)))
        seconds = time.perf_counter() - began
        ms = 1e3 * median(self.beside) if self.beside else math.nan
        turns, tokens = self.engine.turns / seconds, self.engine.tokens / seconds
        return {"turns/s": turns, "tokens/s": tokens, "ms a call beside its turn": ms}


async def measure(name: str, args: Any) -> dict[str, list[dict[str, float]]]:
    from rose.engine.vllm_engine import Engine as Vllm

    turns, episodes, kv_gib = SIZES[name]
    own = ("rollout.max_sequences=64", f"rollout.kv_cache_gib={kv_gib}", "rollout.threads=2")
    c = configured(f"model={name}", *own)
    model, folder = c.model, models.resolve(c.model)
    engine = await Vllm.start(folder, c.rollout, model)
    gateway = Gateway("bench")
    await gateway.open("127.0.0.1")
    try:
        chat = ChatFormat.of(folder, model)
        bench = Bench(engine, chat, model.max_context, gateway, turns)
        for way, play in bench.ways.items():  # warm-up of caches and imports
            await bench.run(play, f"warm-{way}", 8, 8)
        found: dict[str, list[dict[str, float]]] = {}
        for number in range(args.rounds):
            runs = {way: (play, episodes, args.agents) for way, play in bench.ways.items()}
            for way, (play, *size) in (runs | {"one agent": (bench.over_http, 8, 1)}).items():
                made = await bench.run(play, f"{way}{number}", *size)
                found.setdefault(way, []).append(made)
        return found
    finally:
        await gateway.close()
        await engine.shutdown()


def summarise(name: str, found: dict[str, list[dict[str, float]]]) -> None:
    rows = []
    for way, rounds in found.items():
        row = {"way": way} | {key: median(each[key] for each in rounds) for key in rounds[0]}
        both = zip(rounds, found["loop"], strict=True)
        rows.append(row | {"of the loop's": median(a["tokens/s"] / b["tokens/s"] for a, b in both)})
    show(rows, name)


def step_s(scratch: str, name: str, *overrides: str) -> float:
    """Run launch.py and return the median seconds of a step, without the first."""
    paths = f"{REPOSITORY}:{Path(__file__).parent}"
    run = ran(
        scratch, name, f"trainer.steps={STEPS}", "observe.terminal=false", "env.step_timeout_s=120",
        *overrides, env=os.environ | {"PYTHONPATH": paths}, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    return median(row["time_step"] for row in run.steps(1))


def rewards(scratch: str) -> None:
    path = f"reward.args.path={Path(__file__).resolve()}:slow_score"
    runs = {
        "none": [],
        "inside": ["env.name=bench_agents:SlowLake"],
        "pool": ["reward=function", path, "reward.min_workers=2", "reward.per_worker=32"],
    }
    rows = [{"rewards": name, "step s": step_s(scratch, name, *own)} for name, own in runs.items()]
    show(rows, "rewards of 2 s")


def main() -> int:
    args = flagged(__doc__, parts=[*SIZES, "rewards"], agents=64, rounds=3)
    with tempfile.TemporaryDirectory(prefix="rose-bench-") as scratch:
        os.environ["TMPDIR"] = scratch
        for part in args.parts:
            if part == "rewards":
                rewards(scratch)
            else:
                summarise(part, asyncio.run(measure(part, args)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
