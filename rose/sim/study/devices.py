"""The online service on cooperative devices: a trace, its rate, and what each device does with it.

The rate is given, or a share (sim.serving.load) of the highest at which a device alone keeps its
P99 targets: an operator sizes a service by its peaks, which is why there is something to borrow
(sim.serving.rate=null).
"""

from __future__ import annotations

import functools
import inspect
import json
from pathlib import Path

from rose.config import ConfigError, SimServing
from rose.sim import serving, spec, traces
from rose.sim.traces.trace import LARGEST

# devices that are computed; the others do as these, shifted in time
VARIANTS = 4  # ours: as many as cost little; each is an equal share of one trace
# of the search for the rate: scaling a trace's times changes its bursts, so it is made anew once
ROUNDS = 2  # ours: once more on a trace made at about that rate
FIRST_RATE = 4.0  # ours: requests/s, where that search begins
FIRST_S = 600.0  # ours: seconds of the trace that it is made on
GENERATED = tuple(inspect.signature(traces.generate).parameters)


def make(
    s: SimServing, engine: spec.Engine, workers: int, executor: str, seed: int
) -> spec.Serving:
    """Beside the online `engine`, which has the whole device's KV memory. Raises `ConfigError`."""
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
    """At `rate` requests/s on average; of a file from its beginning."""
    path, args = json.loads(source)
    if path is None:
        return traces.generate(
            seed, rate=rate, **(args | ({"seconds": seconds} if seconds else {}))
        )
    # conf has arguments of generate
    limits = {name: value for name, value in args.items() if name not in GENERATED}
    found = traces.read(Path(path)).clipped(
        **{"max_prompt": LARGEST, "max_output": LARGEST} | limits
    )
    shortest = 1e-9  # numerics: a trace of one instant divides nothing by zero
    return found.scaled(len(found) / max(found.seconds, shortest) / rate)


@functools.lru_cache(maxsize=8)
def _provisioned(source: str, ttft_s: float, tpot_s: float, engine: spec.Engine) -> float:
    """Requests/s of one device that just keeps its targets."""
    rate = FIRST_RATE
    for _ in range(ROUNDS):
        rate /= serving.provisioned(_trace(source, 0, rate, FIRST_S), engine, ttft_s, tpot_s)
    return rate
