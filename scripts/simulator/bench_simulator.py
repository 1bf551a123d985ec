"""Measure the simulator's time, memory and events/s at three sizes, and compare it with simpy.

    python scripts/simulator/bench_simulator.py                          # 100, 1,000 and 10,000 GPUs (a few minutes)
    python scripts/simulator/bench_simulator.py --sizes 10000 --csv docs/results/bench_simulator.csv

Each GPU is an engine, with five trajectories of eight turns for each, scheduled by cache-affine
routing: the whole of `rose.parts.simulator.probes.scale`, including the scheduler's decisions. A size runs in a
process of its own, so that its peak memory can be read. Beside simpy (`pip install simpy`), on the
same arrivals: k engines with one sequence each (M/M/k; simpy: a Resource). rose.parts.simulator also makes a
scheduler's decision for each arrival.
"""

from __future__ import annotations

import multiprocessing
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from rose.parts.simulator import probes
from scripts.csv_tables import write_csv
from scripts.harness import flagged

TURNS, PER_GPU = 8, 5
ARRIVALS, LOAD, TOKENS = 20_000, 0.8, 200  # arrivals, utilisation, mean tokens of an arrival


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


def lengths(draw: np.random.Generator, count: int) -> np.ndarray:
    return draw.exponential(1.0, count)


def arrivals(workers: int) -> tuple[list[float], list[int]]:
    """Return the times and tokens of the arrivals, those of `probes.queue`."""
    draw = np.random.default_rng(0)
    tokens = np.maximum(np.ceil(lengths(draw, ARRIVALS) * TOKENS - 0.5), 1).astype(int)
    at = np.sort(draw.random(ARRIVALS)) * ARRIVALS * TOKENS * probes.TOKEN_S / (LOAD * workers)
    return at.tolist(), tokens.tolist()


def simpy_servers(workers: int) -> float:
    """Return the mean seconds in simpy's system. Workers serve one arrival at a time."""
    import simpy

    world, total = simpy.Environment(), 0.0
    servers = simpy.Resource(world, workers)

    def served(at: float, tokens: int):
        nonlocal total
        yield world.timeout(at)
        with servers.request() as place:
            yield place
            yield world.timeout(tokens * probes.TOKEN_S)
        total += world.now - at

    for at, tokens in zip(*arrivals(workers), strict=True):
        world.process(served(at, tokens))
    world.run()
    return total / ARRIVALS


def ours(workers: int) -> float:
    return probes.queue(LOAD, TOKENS, workers, 1, ARRIVALS, 0, lengths).mean()


def pace(run: Callable[[int], float], workers: int) -> str:
    """Return arrivals per second of this thread's CPU time, and the mean time in the system."""
    began = time.thread_time()
    mean = run(workers)
    took = time.thread_time() - began
    return f"{ARRIVALS / took:,.0f} arrivals/s (mean {1000 * mean:.1f} ms in the system)"


def beside_simpy() -> None:
    for workers in (4, 100):
        print(f"{workers} engines: rose.parts.simulator {pace(ours, workers)}", flush=True)
        try:
            print(f"{workers} engines: simpy {pace(simpy_servers, workers)}", flush=True)
        except ModuleNotFoundError:
            print("simpy is not installed (pip install simpy): no comparison")


def main() -> None:
    options = flagged(__doc__, sizes=[100, 1000, 10_000], csv=Path)
    rows = []
    for gpus in options.sizes:
        with multiprocessing.get_context("spawn").Pool(1) as process:
            rows.append(process.apply(measured, (gpus,)))
        print("  ".join(f"{key} {value:,}" for key, value in rows[-1].items()), flush=True)
    if options.csv:
        write_csv(options.csv, rows)
    beside_simpy()


if __name__ == "__main__":
    main()
