"""Measure the simulator's time, memory and events/s at three sizes, and compare it with simpy.

    python scripts/simulator/bench_simulator.py                   # 100, 1,000 and 10,000 GPUs (a few minutes)
    python scripts/simulator/bench_simulator.py --sizes 10000

Each GPU is an engine, with five trajectories of eight turns for each, scheduled by cache-affine
routing: the whole of `rose.parts.simulator.probes.scale`, including the scheduler's decisions. A
size runs in a process of its own, so that its peak memory can be read. Beside simpy (`pip install
simpy`), on the same arrivals: four engines with one sequence each (M/M/4; simpy: a Resource).
rose.parts.simulator also makes a scheduler's decision for each arrival.
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
from scripts.harness import flagged

TURNS, PER_GPU = 8, 5
WORKERS, ARRIVALS, LOAD, TOKENS = 4, 20_000, 0.8, 200  # load: utilisation; mean tokens


def measured(gpus: int) -> dict[str, float]:
    began = time.perf_counter()
    result = probes.scale(gpus, PER_GPU * gpus, TURNS)
    seconds = time.perf_counter() - began
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    found = {"trajectories": PER_GPU * gpus, "wall_s": round(seconds, 2), "events": result.events}
    return found | {"events_per_s": round(result.events / seconds), "peak_gib": round(peak, 3)}


def lengths(draw: np.random.Generator, count: int) -> np.ndarray:
    return draw.exponential(1.0, count)


def simpy_servers() -> float:
    """Return the mean seconds in simpy's system, of the arrivals of `probes.queue`."""
    import simpy

    draw = np.random.default_rng(0)
    tokens = np.maximum(np.ceil(lengths(draw, ARRIVALS) * TOKENS - 0.5), 1).astype(int)
    seconds = ARRIVALS * TOKENS * probes.TOKEN_S / (LOAD * WORKERS)
    at = np.sort(draw.random(ARRIVALS)) * seconds
    world, total = simpy.Environment(), 0.0
    servers = simpy.Resource(world, WORKERS)

    def served(at: float, tokens: int):
        nonlocal total
        yield world.timeout(at)
        with servers.request() as place:
            yield place
            yield world.timeout(tokens * probes.TOKEN_S)
        total += world.now - at

    for arrival in zip(at.tolist(), tokens.tolist(), strict=True):
        world.process(served(*arrival))
    world.run()
    return total / ARRIVALS


def ours() -> float:
    return probes.queue(LOAD, TOKENS, WORKERS, 1, ARRIVALS, 0, lengths).mean()


def pace(run: Callable[[], float]) -> str:
    """Return arrivals per second of this thread's CPU time, and the mean time in the system."""
    began = time.thread_time()
    mean = run()
    took = time.thread_time() - began
    return f"{ARRIVALS / took:,.0f} arrivals/s (mean {1000 * mean:.1f} ms in the system)"


def main() -> None:
    for gpus in flagged(__doc__, sizes=[100, 1000, 10_000]).sizes:
        with multiprocessing.get_context("spawn").Pool(1) as process:
            row = process.apply(measured, (gpus,))
        print(f"{gpus:,} GPUs", *(f"{key} {value:,}" for key, value in row.items()), flush=True)
    print(f"{WORKERS} engines: rose.parts.simulator {pace(ours)}", flush=True)
    try:
        print(f"{WORKERS} engines: simpy {pace(simpy_servers)}")
    except ModuleNotFoundError:
        print("simpy is not installed (pip install simpy): no comparison")


if __name__ == "__main__":
    main()
