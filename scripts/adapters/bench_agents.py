"""Measure the cost of the gateway and of slow rewards: FrozenLake by ROSE's own loop and by agents
over HTTP, on one engine; rewards in an environment and in the pool of reward workers.

    python scripts/adapters/bench_agents.py [--parts tiny smollm2 rewards] [--agents 64] [--rounds 3]

tiny and smollm2, the models: four kinds of agent run for `--rounds` rounds on the same seeds, one
kind after the other, with `--agents` trajectories at once:
    loop      ROSE's own loop
    http      the gateway with coroutines of this process as agents (raw HTTP, so that the cost is
              the gateway's and not a client library's)
    function  the gateway with a forked process for each trajectory, as env.args.function
    command   the gateway with a started process for each trajectory, as env.args.command
Prints medians of turns/s and tokens/s, the ratio of tokens/s to the loop's, and the milliseconds of
an HTTP call beyond its turn, for one agent and for all at once. Turns differ a little by round.

rewards: three runs of launch.py, tiny model, 64 trajectories a step: without a delay; with 2 s at
the end of each trajectory inside the environment, in asyncio's own threads (`asyncio.to_thread`);
with 2 s in `reward=function`. Prints the median step after the first, and the share of the delay
inside the environment that the pool hides.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY))
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")

import aiohttp
from rich.console import Console
from rich.table import Table

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
from scripts.harness import configured, flagged
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
        tokens, logprobs, versions = [], [], []
        async for chunk in self._engine.generate(request.turn, request.tokens, request.sampling):
            tokens += chunk.tokens
            logprobs += chunk.logprobs
            versions += [chunk.version] * len(chunk.tokens)
        self.tokens += len(tokens)
        self.turns += 1
        packed = (p.pack_tokens(tokens), p.pack_floats(logprobs), p.pack_tokens(versions))
        return p.TurnResult(request.turn, *packed, chunk.finish)


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
        program, given = f"{REPOSITORY}/scripts/adapters/bench_agents_program.py", ["BENCH_TURNS"]
        function = Agent(function=f"{program}:solve", environment=given)
        command = Agent(command=[sys.executable, program], environment=given)
        self.ways = {
            "loop": self.own_loop,
            "http": self.over_http,
            "function": partial(self.by_process, function),
            "command": partial(self.by_process, command),
        }
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

    async def by_process(self, agent: Agent, start: p.StartTrajectory) -> None:
        await run_agent(
            start, agent, self.gateway, self.chat, self.engine, self.limits, "env",
            self.context, SAMPLING, time.time,
        )  # fmt: skip

    async def run(self, play: Any, tag: str, episodes: int, agents: int) -> dict[str, float]:
        """Return turns/s, tokens/s and the median milliseconds of a call beyond its turn."""
        gate = asyncio.Semaphore(agents)
        self.engine.tokens = self.engine.turns = 0
        self.beside.clear()

        async def one(number: int) -> None:
            async with gate:
                await play(
                    p.StartTrajectory(f"{tag}.{number}", tag, p.Phase.TRAIN, "", 2 * number, None)
                )

        began = time.perf_counter()
        await asyncio.gather(*map(one, range(episodes)))
        seconds = time.perf_counter() - began
        ms = 1e3 * statistics.median(self.beside) if self.beside else float("nan")
        turns, tokens = self.engine.turns / seconds, self.engine.tokens / seconds
        return {"turns": turns, "tokens": tokens, "beside": ms}


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
            for way, (play, *size) in (runs | {"alone": (bench.over_http, 8, 1)}).items():
                made = await bench.run(play, f"{way}{number}", *size)
                found.setdefault(way, []).append(made)
        return found
    finally:
        await gateway.close()
        await engine.shutdown()


def show(name: str, found: dict[str, list[dict[str, float]]]) -> None:
    table = Table(name, "turns/s", "tokens/s", "of the loop's", "ms a call beside its turn")
    for way, rounds in found.items():
        turns, tokens, beside = (
            statistics.median(each[key] for each in rounds) for key in ("turns", "tokens", "beside")
        )
        ratio = statistics.median(
            each["tokens"] / base["tokens"]
            for each, base in zip(rounds, found["loop"], strict=True)
        )
        shown = "" if way == "alone" else f"{ratio:.2f}"
        ms = "" if beside != beside else f"{beside:.1f}"
        table.add_row(way, f"{turns:.1f}", f"{tokens:.0f}", shown, ms)
    Console().print(table)


def step_s(scratch: str, name: str, *overrides: str) -> float:
    """Run launch.py and return the median seconds of a step, without the first."""
    paths = f"{REPOSITORY}:{Path(__file__).parent}"
    run = ran(
        scratch, name, f"trainer.steps={STEPS}", "observe.terminal=false", "env.step_timeout_s=120",
        *overrides, env=os.environ | {"PYTHONPATH": paths}, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    return statistics.median(row["time_step"] for row in run.steps(1))


def rewards(scratch: str) -> None:
    at_once = ("reward.min_workers=2", "reward.per_worker=32")
    path = f"reward.args.path={Path(__file__).resolve()}:slow_score"
    none = step_s(scratch, "none")
    inside = step_s(scratch, "inside", "env.name=bench_agents:SlowLake")
    pool = step_s(scratch, "pool", "reward=function", path, *at_once)
    table = Table("rewards of 2 s", "step (s)", "hidden")
    table.add_row("none", f"{none:.2f}")
    table.add_row("inside", f"{inside:.2f}")
    table.add_row("pool", f"{pool:.2f}", f"{(inside - pool) / (inside - none):.0%}")
    Console().print(table)


def main() -> int:
    args = flagged(__doc__, parts=[*SIZES, "rewards"], agents=64, rounds=3)
    with tempfile.TemporaryDirectory(prefix="rose-bench-") as scratch:
        os.environ["TMPDIR"] = scratch
        for part in args.parts:
            if part == "rewards":
                rewards(scratch)
            else:
                show(part, asyncio.run(measure(part, args)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
