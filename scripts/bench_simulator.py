"""What the simulator costs: time, memory and events/s at three sizes, and beside simpy on the same
small model.

    python scripts/bench_simulator.py                          # 100, 1,000 and 10,000 GPUs (a few minutes)
    python scripts/bench_simulator.py --sizes 10000 --csv docs/results/bench_simulator.csv

Each GPU is an engine, with five trajectories of eight turns for each, scheduled by cache-affine
routing: the whole of `rose.sim.probes.scale`, the scheduler's decisions included. A size runs in a
process of its own, for its memory. The small model is M/M/4, by `rose.sim.probes.queue` and by
simpy's Resource: requests per second of each; simpy (`pip install simpy`) is needed for this line
only, and does neither batching nor scheduling.
"""

from __future__ import annotations

import argparse
import csv
import multiprocessing
import resource
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rose.sim import probes

TURNS, PER_GPU = 8, 5
ARRIVALS, SERVERS, LOAD, TOKENS = 20_000, 4, 0.7, 200


def measured(gpus: int) -> dict[str, float]:
    began, cpu = time.perf_counter(), time.process_time()
    result = probes.scale(gpus, PER_GPU * gpus, TURNS)
    seconds = time.perf_counter() - began
    return {
        "gpus": gpus,
        "trajectories": PER_GPU * gpus,
        "turns": result.counts.turns,
        "wall_s": round(seconds, 2),
        "cpu_s": round(time.process_time() - cpu, 2),
        "events": result.events,
        "events_per_s": round(result.events / seconds),
        "decisions": result.counts.decisions,
        "peak_gib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 3),
    }


def ours() -> float:
    """Requests per second of wall time."""
    began = time.perf_counter()
    probes.queue(
        LOAD, TOKENS, SERVERS, 1, ARRIVALS, 0, lambda draw, count: draw.exponential(1.0, count)
    )
    return ARRIVALS / (time.perf_counter() - began)


def simpys() -> float:
    import simpy

    draw = np.random.default_rng(0)
    gaps = draw.exponential(TOKENS / (LOAD * SERVERS), ARRIVALS).tolist()
    lengths = draw.exponential(TOKENS, ARRIVALS).tolist()
    environment = simpy.Environment()
    servers = simpy.Resource(environment, SERVERS)

    def request(length: float):
        with servers.request() as turn:
            yield turn
            yield environment.timeout(length)

    def arrive():
        for gap, length in zip(gaps, lengths, strict=False):
            yield environment.timeout(gap)
            environment.process(request(length))

    environment.process(arrive())
    began = time.perf_counter()
    environment.run()
    return ARRIVALS / (time.perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=[100, 1000, 10_000], help="GPUs")
    parser.add_argument("--csv", type=Path)
    options = parser.parse_args()
    rows = []
    for gpus in options.sizes:
        with multiprocessing.get_context("spawn").Pool(1) as process:
            rows.append(process.apply(measured, (gpus,)))
        print("  ".join(f"{key} {value:,}" for key, value in rows[-1].items()), flush=True)
    if options.csv:
        with options.csv.open("w", newline="") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)
    print(f"M/M/{SERVERS}: rose.sim {ours():,.0f} requests/s", flush=True)
    try:
        print(f"M/M/{SERVERS}: simpy {simpys():,.0f} requests/s")
    except ModuleNotFoundError:
        print("simpy is not installed (pip install simpy): no comparison")


if __name__ == "__main__":
    main()
