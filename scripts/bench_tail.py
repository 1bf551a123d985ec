"""Measure the gain from training before the tail of rollouts ends, live on this machine: steps with
and without trainer.stream.

    python scripts/bench_tail.py                 # ten minutes
    python scripts/bench_tail.py --pairs 3       # a quick run

The tiny model plays FrozenLake. The first move takes seconds, drawn by the task: log-normal with a
median of --median s, so that of a step's 32 groups the slowest takes three times as long. That time
costs no CPU, as with tools that run elsewhere. The engine and the trainer have a core each, the
engine by a quota (live_runs.py), so that neither slows the other on two cores or more.

Every other step of one run streams. In even steps the batching policy is `synchronous`; in odd
steps it declares no group certain early, so these train whole batches. Prints the ratio of
neighbouring steps' times, its median and quartiles, and the median of `stream_hidden`, the share of
the trainer's time before the batch was complete.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rose.agent.envs.base import Action, Start, Step
from rose.agent.envs.frozen_lake import FrozenLake
from rose.policies.verl import Synchronous
from scripts.harness import flagged
from scripts.live_runs import Live, end_in_order
from scripts.runs import REPOSITORY

DEADLINE_S = 1800.0
SKIPPED = 2  # first steps, in which kernels are compiled and quotas set
SIGMA = 0.5  # deviation of the logarithm: the largest of 32 draws is three times the median
GROUPS, SIZE = 32, 8
RUN = (
    "env.name=bench_tail:SlowLake",
    "env.step_timeout_s=300",
    f"rollout.group_size={SIZE}",
    f"rollout.max_sequences={GROUPS * SIZE}",
    f"trainer.batch_size={GROUPS * SIZE}",
    "rollout.workers=1",
    "serving=none",
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


def main() -> None:
    options = flagged(__doc__, None, "OVERRIDE", pairs=10, median=3.0, quota=1.0)
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), str(REPOSITORY)])
    end_in_order()
    own = (f"trainer.steps={SKIPPED + 2 * options.pairs}", f"+env.args.median_s={options.median}")
    with tempfile.TemporaryDirectory(prefix="rose-bench-tail-") as scratch:
        live = Live(Path(scratch), "tail", [*RUN, *own, *options.words], options.quota)
        live.wait(DEADLINE_S)
        rows = live.steps(SKIPPED)
    whole, stream = ([row for row in rows if row["step"] % 2 == kind] for kind in (1, 0))
    ratios = [a["time_step"] / b["time_step"] for a, b in zip(whole, stream, strict=True)]
    low, middle, high = np.percentile(ratios, (25, 50, 75))
    hidden = np.median([row["stream_hidden"] for row in stream])
    print(f"{len(ratios)} pairs: faster by {middle:.2f} (quartiles {low:.2f}, {high:.2f})")
    print(f"hidden: {hidden:.0%} of the training")


if __name__ == "__main__":
    main()
