"""Measure the simulator's time, memory and events/s at three sizes.

    python scripts/simulator/bench_simulator.py                   # 100, 1,000 and 10,000 GPUs (a few minutes)
    python scripts/simulator/bench_simulator.py --sizes 10000

Each GPU is an engine, with five trajectories of eight turns for each, scheduled by cache-affine
routing: the whole of `rose.parts.simulator.probes.scale`, including the scheduler's decisions. A
size runs in a process of its own, so that its peak memory can be read.
"""

from __future__ import annotations

import multiprocessing
import resource
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from rose.parts.simulator import probes
from scripts.harness import flagged

TURNS, PER_GPU = 8, 5


def measured(gpus: int) -> dict[str, float]:
    began = time.perf_counter()
    result = probes.scale(gpus, PER_GPU * gpus, TURNS)
    seconds = time.perf_counter() - began
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    found = {"trajectories": PER_GPU * gpus, "wall_s": round(seconds, 2), "events": result.events}
    return found | {"events_per_s": round(result.events / seconds), "peak_gib": round(peak, 3)}


def main() -> None:
    for gpus in flagged(__doc__, sizes=[100, 1000, 10_000]).sizes:
        with multiprocessing.get_context("spawn").Pool(1) as process:
            row = process.apply(measured, (gpus,))
        print(f"{gpus:,} GPUs", *(f"{key} {value:,}" for key, value in row.items()), flush=True)


if __name__ == "__main__":
    main()
