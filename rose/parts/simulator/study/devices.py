"""The online service on cooperative devices: its trace, its rate, and the load of each device.

The rate is configured, or (sim.serving.rate=null) a share, sim.serving.load, of the highest rate at
which a device alone meets its P99 targets. Operators size a service by its peaks; this leaves idle
GPU time to borrow.
"""

from __future__ import annotations

import functools
import inspect
import json
from pathlib import Path

from rose.config import ConfigError
from rose.parts.simulator import serving, spec, traces
from rose.parts.simulator.config import SimServing
from rose.parts.simulator.traces.trace import LARGEST

# Number of devices that are computed. The others repeat their loads, shifted in time.
VARIANTS = 4  # ours: cheap to compute; each gets an equal share of one trace
# Rounds of the search for the rate. Scaling a trace's times changes its bursts, so that the second
# round searches again on a trace generated at about the rate found.
ROUNDS = 2  # ours: one repetition
FIRST_RATE = 4.0  # ours: requests/s at which the search begins
FIRST_S = 600.0  # ours: seconds of the trace of the search
GENERATED = tuple(inspect.signature(traces.generate).parameters)


def make(
    s: SimServing, engine: spec.Engine, workers: int, executor: str, seed: int
) -> spec.Serving:
    """Return the serving on a pool of `workers` with this online engine. Raises `ConfigError`."""
    source = json.dumps([s.trace, s.args], sort_keys=True)
    beside = {
        "gate": serving.Beside(engine, s.pace * s.slo.tpot_p99_s, s.hold_s),
        "none": None,
        "memory_only": serving.contended(engine, s.contention),
    }[executor]
    devices = _devices(
        source, s.rate, s.load, s.slo.ttft_p99_s, s.slo.tpot_p99_s, engine, workers, beside, seed
    )
    return spec.Serving(
        devices=devices,
        executor=executor,
        ttft_slo_s=s.slo.ttft_p99_s,
        tpot_slo_s=s.slo.tpot_p99_s,
        overhead=s.overhead,
        contention=s.contention,
        reserve=s.reserve,
        high_watermark=s.high_watermark,
        step=s.step,
        gap_p99_s=devices.gap_p99_s,
    )


@functools.lru_cache(maxsize=32)
def _devices(
    source: str,
    rate: float | None,
    share: float,
    ttft_s: float,
    tpot_s: float,
    engine: spec.Engine,
    workers: int,
    beside: serving.Beside | None,
    seed: int,
) -> serving.Devices:
    """Return the loads of the pool's devices. Raises `ConfigError`."""
    variants = max(1, min(VARIANTS, workers))
    try:
        rate = rate or share * _provisioned(source, ttft_s, tpot_s, engine)
        trace = _trace(source, seed, rate * variants)
        return serving.devices(trace, engine, workers, variants, beside)
    except (OSError, ValueError, TypeError, OverflowError, MemoryError) as error:
        trace, args = json.loads(source)
        raise ConfigError(
            f"sim.serving.trace={trace!r}, sim.serving.args={args}: {error}"
        ) from None


def _trace(source: str, seed: int, rate: float, seconds: float | None = None) -> traces.Trace:
    """Return a trace, generated or from a file, with `rate` requests/s on average."""
    path, args = json.loads(source)
    if path is None:
        return traces.generate(
            seed, rate=rate, **(args | ({"seconds": seconds} if seconds else {}))
        )
    # The configuration may also have arguments of `generate`, which don't apply to a file.
    limits = {name: value for name, value in args.items() if name not in GENERATED}
    found = traces.read(Path(path)).clipped(
        **{"max_prompt": LARGEST, "max_output": LARGEST} | limits
    )
    shortest = 1e-9  # numerics: no division by zero for a trace of one instant
    return found.scaled(len(found) / max(found.seconds, shortest) / rate)


@functools.lru_cache(maxsize=8)
def _provisioned(source: str, ttft_s: float, tpot_s: float, engine: spec.Engine) -> float:
    """Return the requests/s at which one device just meets its targets."""
    rate = FIRST_RATE
    for _ in range(ROUNDS):
        rate /= serving.provisioned(_trace(source, 0, rate, FIRST_S), engine, ttft_s, tpot_s)
    return rate
