"""Batching and order policies, each alone against `synchronous` and `fifo`, in a small simulated
cluster.

    python scripts/study_alone.py        # about a minute on a core of its own; the figures of docs/policies.md ("Alone")

A made-up workload that shows directions: 2 engines of 16 sequences, a trainer of 20 s per step,
agents of many turns whose number and lengths are drawn per prompt and shared, roughly, by the
members of its group. For the sizes of a real cluster: scripts/reproduce_rose.py and
scripts/study_policies.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import yaml

from rose.config import Policy
from rose.config import Scheduler as SchedulerConfig
from rose.policies import build
from rose.sim import spec
from rose.sim.driver import simulate
from rose.sim.probes import GPU, dedicated
from rose.sim.result import Result

CONF = Path(__file__).parents[1] / "conf" / "scheduler"
BATCHING = [
    "synchronous",
    "dapo",
    "tail_batching",
    "one_step_off",
    "bounded_staleness",
    "trajectory_async",
    "carry_over",
]
ORDERS: list[tuple[str, dict[str, Any]]] = [
    ("fifo", {}),
    ("longest_first", {}),
    ("mlfq", {}),
    ("mlfq", {"first": "long"}),
]
SEEDS = range(3)
ENGINE = spec.Engine(spec.StepTime(0.008, 2e-5, 1e-10, 2e-4, 2e-8), 16, 8192, 400_000, True)


class Heavy:
    """Turns whose outputs differ by prompt: a few prompts make the tail. For batching."""

    max_new_tokens = 2048

    def group(
        self, index: int, size: int, version: int, draw: np.random.Generator
    ) -> list[spec.Episode]:
        hard = draw.lognormal(0.0, 1.0)
        return [
            self._episode(draw, hard, int(np.clip(draw.geometric(0.25), 1, 16)))
            for _ in range(size)
        ]

    def _episode(self, draw: np.random.Generator, hard: float, turns: int) -> spec.Episode:
        output = np.clip(draw.lognormal(4.5, 0.6, turns) * hard, 1, self.max_new_tokens)
        return episode(draw, output, min(0.9, 0.2 * hard), draw.exponential(1.0, turns))


class Many:
    """Many turns, their number differing by prompt. For orders."""

    max_new_tokens = 1024

    def group(
        self, index: int, size: int, version: int, draw: np.random.Generator
    ) -> list[spec.Episode]:
        hard = draw.lognormal(0.0, 0.8)
        turns = np.clip(6 * hard * draw.lognormal(0.0, 0.3, size), 1, 60).astype(int)
        return [
            episode(
                draw,
                np.clip(draw.lognormal(5.0, 0.5, n), 1, self.max_new_tokens),
                min(0.9, 0.15 * hard),
                np.full(n, 0.5),
            )
            for n in turns
        ]


class Single(Heavy):
    """One long response each. For orders."""

    max_new_tokens = 16384

    def group(
        self, index: int, size: int, version: int, draw: np.random.Generator
    ) -> list[spec.Episode]:
        tokens = np.clip(
            1000 * draw.lognormal(0.0, 1.0) * draw.lognormal(0.0, 0.3, size), 1, self.max_new_tokens
        )
        return [episode(draw, tokens[i : i + 1], 0.0, np.zeros(1)) for i in range(size)]


def episode(
    draw: np.random.Generator, output: np.ndarray, failing: float, tool_s: np.ndarray
) -> spec.Episode:
    count = len(output)
    return spec.Episode(
        300,
        tuple(output.astype(int).tolist()),
        tuple(draw.integers(20, 60, count).tolist()),
        tuple(tool_s.tolist()),
        tuple((draw.random(count) < failing).tolist()),
        float(draw.random() < 0.5),
    )


def policy(kind: str, name: str, **change: Any) -> Policy:
    option = yaml.safe_load((CONF / kind / f"{name}.yaml").read_text())
    return Policy(name=option["name"], args=option["args"] | change)


def run(
    environment: spec.Environment,
    batching: Policy,
    order: Policy,
    groups: int,
    steps: int,
    seed: int,
) -> Result:
    scheduler = build(
        SchedulerConfig(
            provisioning=policy("provisioning", "fixed"),
            routing=policy("routing", "cache_affine"),
            order=order,
            batching=batching,
            queue_depth=0.0,
        ),
        turn_timeout_s=1e9,
    )
    what = spec.Spec(
        "study",
        steps,
        spec.Batch(groups, 8, False),
        environment,
        spec.Trainer(0, GPU, 1.0, 0.0, 20.0, 1.0),
        (dedicated(2, ENGINE),),
        1.0,
        5.0,
        0.001,
        0.001,
    )
    return simulate(what, scheduler, seed)


def row(name: str, results: list[Result], baseline: float) -> float:
    """Prints a policy's means over the seeds; returns its seconds per step."""
    seconds = float(np.mean([r.steps[-1].ended / len(r.steps) for r in results]))
    trained = sum(step.tokens for r in results for step in r.steps)
    stale = [versions for r in results for step in r.steps for versions in step.staleness]
    print(
        f"| {name} | {seconds:.1f} | {seconds / (baseline or seconds):.2f} | "
        f"{trained / sum(r.steps[-1].ended for r in results):.0f} | "
        f"{sum(r.counts.dropped_tokens for r in results) / trained:.2f} | {np.mean(stale):.2f} "
        f"({max(stale)}) |",
        flush=True,
    )
    return seconds


def table(title: str, rows: list[tuple[str, list[Result]]]) -> None:
    print(
        f"\n{title}\n\n| policy | s per step | of the first | trained tokens/s | dropped per "
        "trained token | "
        "staleness, mean (most) |\n|---|---|---|---|---|---|"
    )
    baseline = 0.0
    for name, results in rows:
        seconds = row(name, results, baseline)
        baseline = baseline or seconds


def main() -> None:
    fifo = policy("order", "fifo")
    table(
        "Batching, 16 groups of 8, 12 steps",
        [
            (name, [run(Heavy(), policy("batching", name), fifo, 16, 12, seed) for seed in SEEDS])
            for name in BATCHING
        ],
    )
    for environment in (Many(), Single()):
        table(
            f"Order, 32 groups of 8, 6 steps: {environment.__doc__}",
            [
                (
                    " ".join([name, *change.values()]),
                    [
                        run(
                            environment,
                            policy("batching", "synchronous"),
                            policy("order", name, **change),
                            32,
                            6,
                            seed,
                        )
                        for seed in SEEDS
                    ],
                )
                for name, change in ORDERS
            ],
        )


if __name__ == "__main__":
    main()
