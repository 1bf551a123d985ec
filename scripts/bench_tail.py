"""What training before the tail ends gains, live on this machine: steps with and without
trainer.stream.

    python scripts/bench_tail.py                       # half an hour
    python scripts/bench_tail.py --rounds 1 --steps 3  # a look
    python scripts/bench_tail.py --csv docs/results/bench_tail.csv

The tiny model plays FrozenLake, whose first move takes seconds, drawn by the task: log-normal with
a median of --median s, so that of a step's 32 groups the slowest takes three times as long. That
time costs no CPU, as tools that run elsewhere; the engine and the trainer have a core each, the
engine by a quota (live_runs.py), so that neither makes the other slower on two cores or more. Runs
with and without take turns, in another order each round, seeds alike. Counted are --steps steps of
each, the first two aside. Printed: medians of steps and of their parts; the ratio of the mean steps
of a round's two runs, median, smallest and largest; and `stream_hidden`, the share of the trainer's
time before the batch was complete.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from csv_tables import shown, write_csv
from live_runs import REPOSITORY, Live, end_in_order
from rich.console import Console

from rose.agent.envs.base import Action, Start, Step
from rose.agent.envs.frozen_lake import FrozenLake

DEADLINE_S = 900.0  # of one run
SKIPPED = 2  # steps: kernels are compiled, quotas set
SIGMA = 0.5  # of the logarithm: the largest of 32 draws is three times the median
GROUPS, SIZE = 32, 8
SYSTEMS = {"whole batch": "trainer.stream=false", "stream": "trainer.stream=true"}


class SlowLake(FrozenLake):
    """The environment of the runs."""

    def __init__(self, median_s: float, **lake: Any) -> None:
        super().__init__(**lake)
        self._median_s = median_s

    async def reset(self, seed: int) -> Start:
        draw = np.random.default_rng(seed).standard_normal()
        self._wait_s = self._median_s * float(np.exp(SIGMA * draw))
        return await super().reset(seed)

    async def step(self, action: Action) -> Step:
        wait_s, self._wait_s = self._wait_s, 0.0
        await asyncio.sleep(wait_s)
        return await super().step(action)


def measure(folder: Path, name: str, system: str, seed: int, options: argparse.Namespace) -> dict:
    """Means over the counted steps of a run."""
    live = Live(
        folder,
        name,
        [
            "env.name=bench_tail:SlowLake",
            f"+env.args.median_s={options.median}",
            "env.step_timeout_s=300",
            f"rollout.group_size={SIZE}",
            f"trainer.batch_size={GROUPS * SIZE}",
            f"rollout.max_sequences={GROUPS * SIZE}",
            "rollout.workers=1",
            "serving=none",
            f"trainer.steps={SKIPPED + options.steps}",
            f"seed={seed}",
            SYSTEMS[system],
            *options.overrides,
        ],
        options.quota,
    )
    live.wait(DEADLINE_S)
    rows = live.steps(SKIPPED)
    rollout = [row["time_rollout"] + row["time_idle"] for row in rows]
    return {
        "system": system,
        "seed": seed,
        "step_s": statistics.mean(row["time_step"] for row in rows),
        "rollout_s": statistics.mean(rollout),
        "train_s": statistics.mean(row["time_train"] for row in rows),
        "computed_s": statistics.mean(row["seconds_forward_backward"] for row in rows),
        "stream_hidden": statistics.mean(row.get("stream_hidden", 0.0) for row in rows),
    }


def show(found: list[dict], console: Console) -> None:
    whole, rows = {m["seed"]: m["step_s"] for m in found if m["system"] == "whole batch"}, []
    for system in SYSTEMS:
        of = [m for m in found if m["system"] == system]
        ratios = [whole[m["seed"]] / m["step_s"] for m in of]
        medians = {
            key: statistics.median(m[key] for m in of)
            for key in ("step_s", "rollout_s", "train_s", "computed_s", "stream_hidden")
        }
        spread = {"faster": statistics.median(ratios), "least": min(ratios), "most": max(ratios)}
        rows.append({"system": system} | medians | spread)
    console.print(shown(rows, f"a step of {GROUPS} groups, medians of {len(whole)} rounds"))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6, help="that count, of each run")
    parser.add_argument("--median", type=float, default=3.0, help="seconds of a first move")
    parser.add_argument("--quota", type=float, default=1.0, help="cores of the engine; 0: no quota")
    parser.add_argument("--csv", type=Path)
    options, options.overrides = parser.parse_known_args()
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), str(REPOSITORY)])
    end_in_order()
    console, found = Console(width=120), []
    with tempfile.TemporaryDirectory(prefix="rose-bench-tail-") as scratch:
        for number in range(options.rounds):
            names = list(SYSTEMS)[:: -1 if number % 2 else 1]
            for system in names:
                name = f"{system.replace(' ', '-')}-{number}"
                found.append(measure(Path(scratch), name, system, number + 1, options))
                console.print(found[-1], highlight=False)
                if options.csv:
                    write_csv(options.csv, found)
    show(found, console)


if __name__ == "__main__":
    main()
