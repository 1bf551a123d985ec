"""Small simulated clusters with known answers, and a large one to measure the simulator's speed.

`queue` is an open queue: single-turn trajectories arrive as a Poisson process at engines whose
steps last a fixed time per sequence in the batch. With one sequence per engine and exponential
lengths this is M/M/k; with many sequences in one engine it is processor sharing, M/G/1-PS.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from rose.config import Policy
from rose.config import Scheduler as SchedulerConfig
from rose.parts.simulator import spec
from rose.parts.simulator.driver import simulate
from rose.parts.simulator.result import Result
from rose.policies import build
from rose.scheduler import Scheduler

TOKEN_S = 0.001  # made up: seconds per token of a sequence alone
GPU = spec.Gpu("probe", 1e15, 3e12, 80 * 2**30, "made up")  # made up: a device of round figures
FREE = spec.Link(0.0, 1e12, 0.0, True, 0.0, 0.0)  # made up: a link that costs nothing


class _Arrivals:
    """Groups of one trajectory of one turn: group i arrives at `at[i]` with `tokens[i]` tokens."""

    max_new_tokens = 1

    def __init__(self, at: np.ndarray, tokens: np.ndarray) -> None:
        self._at, self._tokens = at.tolist(), tokens.tolist()

    def group(
        self, index: int, size: int, version: int, draw: np.random.Generator
    ) -> list[spec.Episode]:
        return [
            spec.Episode(
                1, (self._tokens[index],), (0,), (0.0,), (False,), 1.0, reset_s=self._at[index]
            )
        ]


class _Agents:
    """Agents with lognormal turns and short tool calls, of made-up lengths."""

    max_new_tokens = 1024  # made up: an agent's turn

    def __init__(self, turns: int) -> None:
        self._turns = turns

    def group(
        self, index: int, size: int, version: int, draw: np.random.Generator
    ) -> list[spec.Episode]:
        shape = size, self._turns
        made = draw.lognormal(4.5, 0.6, shape)  # made up: some 90 tokens a turn
        output = np.clip(made, 1, self.max_new_tokens).astype(int).tolist()
        observation = draw.integers(20, 60, shape).tolist()  # made up: tokens
        tool = draw.exponential(1.0, shape).tolist()
        prompt = 300  # made up: tokens
        reward = (draw.random(size) < 0.5).tolist()
        return [
            spec.Episode(prompt, tuple(o), tuple(b), tuple(t), (False,) * self._turns, float(r))
            for o, b, t, r in zip(output, observation, tool, reward, strict=False)
        ]


def scheduler(
    routing: str = "least_loaded",
    turn_timeout_s: float = 1e9,  # made up: none
    **args,
) -> Scheduler:
    """Return a scheduler for a fixed cluster and synchronous steps, first come first served."""
    return build(
        SchedulerConfig(
            provisioning=Policy(name="fixed", args={}),
            routing=Policy(name=routing, args=args),
            order=Policy(name="fifo", args={}),
            batching=Policy(name="synchronous", args={"max_admitted": 1.0}),
            queue_depth=0.0,
        ),
        turn_timeout_s,
    )


def queue(
    load: float,
    mean_tokens: float,
    workers: int,
    sequences: int,
    count: int,
    seed: int,
    lengths: Callable[[np.random.Generator, int], np.ndarray],
) -> np.ndarray:
    """Simulate the queue at utilisation `load`. Return the seconds that each of `count` arrivals
    spends in it. `lengths(draw, count)` draws lengths in units of `mean_tokens`, of mean 1."""
    draw = np.random.default_rng(seed)
    tokens = np.maximum(np.ceil(lengths(draw, count) * mean_tokens - 0.5), 1).astype(np.int64)
    seconds = count * mean_tokens * TOKEN_S / (load * workers)
    at = np.sort(draw.random(count)) * seconds
    batched, kv = 1 << 20, 1 << 40  # made up: tokens, more than are ever used
    step = spec.StepTime(0.0, TOKEN_S, 0.0, TOKEN_S, 0.0)
    engine = spec.Engine(step, sequences, batched, kv, False)
    what = spec.Spec(
        "queue",
        1,
        spec.Batch(count, 1, False),
        _Arrivals(at, tokens),
        spec.Trainer(0, GPU, 1.0, 0.0, 0.0, 0.0),
        (dedicated(workers, engine),),
        math.inf,
        math.inf,
        0.0,
        0.0,
    )
    return simulate(what, scheduler(), seed).turn_s


def dedicated(workers: int, engine: spec.Engine) -> spec.Pool:
    return spec.Pool(
        "dedicated", "dedicated", GPU, 1, engine, FREE, spec.Allocation(0.0, 0.0), workers
    )


def scale(gpus: int, trajectories: int, turns: int, seed: int = 0) -> Result:
    """Simulate a large training step, to measure the simulator's speed: `trajectories` in groups of
    16 (a remainder is left out), of `turns` turns each, on `gpus` one-GPU engines with cache-affine
    routing."""
    step = spec.StepTime(0.008, 2e-5, 1e-10, 2e-5, 2e-8)  # made up: like 8B parameters on an H800
    engine = spec.Engine(step, 64, 8192, 400_000, True)  # made up: likewise
    group_size = 16  # made up: as conf/experiment/rose_8b.yaml has it
    tick_s, progress_s = 0.5, 30.0  # made up: as conf/experiment/rose_8b.yaml has them
    what = spec.Spec(
        "scale",
        1,
        spec.Batch(trajectories // group_size, group_size, False),
        _Agents(turns),
        spec.Trainer(0, GPU, 1.0, 0.0, 5.0, 1.0),  # made up: training takes 5 s
        (dedicated(gpus, engine),),
        tick_s,
        progress_s,
        0.0,
        0.0,
    )
    imbalance = 0.1  # made up: argument of the routing policy
    return simulate(what, scheduler("cache_affine", imbalance=imbalance), seed)
