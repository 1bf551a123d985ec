"""Measure the gain from training before the tail of rollouts ends, live on this machine: steps with
and without trainer.stream.

    python scripts/bench_tail.py                 # ten minutes
    python scripts/bench_tail.py --pairs 3       # a quick run
    python scripts/bench_tail.py --csv docs/results/bench_tail.csv

The tiny model plays FrozenLake. The first move takes seconds, drawn by the task: log-normal with a
median of --median s, so that of a step's 32 groups the slowest takes three times as long. That time
costs no CPU, as with tools that run elsewhere. The engine and the trainer have a core each, the
engine by a quota (live_runs.py), so that neither slows the other on two cores or more.

Every other step of one run streams. In even steps the batching policy is `synchronous`; in odd
steps it declares no group certain early, so these train whole batches. Prints medians of both kinds
of steps; the ratio of neighbouring steps, its median and quartiles; and `stream_hidden`, the share
of the trainer's time before the batch was complete.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rose.agent.envs.base import Action, Start, Step
from rose.agent.envs.frozen_lake import FrozenLake
from rose.policies.verl import Synchronous
from scripts.csv_tables import show, write_csv
from scripts.harness import flagged
from scripts.live_runs import Live, end_in_order
from scripts.runs import REPOSITORY

DEADLINE_S = 1800.0
SKIPPED = 2  # first steps, in which kernels are compiled and quotas set
SIGMA = 0.5  # deviation of the logarithm: the largest of 32 draws is three times the median
GROUPS, SIZE = 32, 8
KINDS = ("whole batch", "stream")  # odd steps, even steps
STREAM = (
    "env.name=bench_tail:SlowLake",
    f"rollout.max_sequences={GROUPS * SIZE}",
    "scheduler.batching.name=bench_tail:EveryOther",
    "trainer.stream=true",
)


class EveryOther(Synchronous):
    """The batching policy of the run: even steps stream."""

    def certain(self) -> list[str]:
        return [] if self._step % 2 else super().certain()


class SlowLake(FrozenLake):
    """The environment of the run: FrozenLake with a slow first move."""

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


def measure(folder: Path, options: Any) -> list[dict]:
    """Run launch.py and return the steps that count."""
    live = Live(
        folder,
        "tail",
        [
            "env.step_timeout_s=300",
            f"rollout.group_size={SIZE}",
            f"trainer.batch_size={GROUPS * SIZE}",
            "rollout.workers=1",
            "serving=none",
            f"trainer.steps={SKIPPED + 2 * options.pairs}",
            *STREAM,
            f"+env.args.median_s={options.median}",
            *options.words,
        ],
        options.quota,
    )
    live.wait(DEADLINE_S)
    return [
        {
            "kind": KINDS[row["step"] % 2 == 0],
            "step": row["step"],
            "step_s": row["time_step"],
            "rollout_s": row["time_rollout"] + row["time_idle"],
            "train_s": row["time_train"],
            "computed_s": row["seconds_forward_backward"],
            "stream_hidden": row["stream_hidden"],
        }
        for row in live.steps(SKIPPED)
    ]


def summarise(found: list[dict]) -> None:
    keys = ("step_s", "rollout_s", "train_s", "computed_s", "stream_hidden")
    kinds = {kind: [m for m in found if m["kind"] == kind] for kind in KINDS}
    rows = [
        {"kind": kind} | {key: statistics.median(m[key] for m in of) for key in keys}
        for kind, of in kinds.items()
    ]
    show(rows, f"a step of {GROUPS} groups, medians of {len(found) // 2}")
    ratios = [one["step_s"] / other["step_s"] for one, other in zip(*kinds.values(), strict=True)]
    low, middle, high = np.percentile(ratios, (25, 50, 75))
    print(f"faster by {middle:.2f} (quartiles {low:.2f}, {high:.2f})")


def main() -> None:
    options = flagged(__doc__, None, "OVERRIDE", pairs=10, median=3.0, quota=1.0, csv=Path)
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), str(REPOSITORY)])
    end_in_order()
    with tempfile.TemporaryDirectory(prefix="rose-bench-tail-") as scratch:
        found = measure(Path(scratch), options)
    if options.csv:
        write_csv(options.csv, found)
    summarise(found)


if __name__ == "__main__":
    main()
