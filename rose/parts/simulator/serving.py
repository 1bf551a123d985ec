"""Online serving on the devices of a cooperative pool: turns a request trace into
`rose.parts.simulator.spec.Devices`.

As behind a load balancer, the requests of one service go to its devices in turn, so that all
devices have their peaks at once. Only a few devices (`variants`) are computed; the others have the
same loads.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, replace

import numpy as np

from rose.parts.simulator import online
from rose.parts.simulator.online import Served
from rose.parts.simulator.spec import Engine, Load, StepTime
from rose.parts.simulator.traces import Trace

PIECE_S = 1.0  # seconds of a piece of a load
# The search for the highest rate that a device sustains multiplies the trace's times by factors.
STRIDE = 4.0  # numerics: ratio between the factors of the first, coarse steps
SLOWEST, FASTEST = STRIDE**6, STRIDE**-12  # numerics: factors beyond which the search fails
ROUNDS = 7  # numerics: bisections of a stride in the logarithm, to 1.1 %
ATTAINED = 0.99  # definition: share of the requests within a P99 target


@dataclass(frozen=True)
class Devices:
    """The devices of a pool. Device i has the load of variant i mod len(loads), shifted by a part
    of a piece, so that not all devices change at the same instant."""

    loads: tuple[Load, ...]
    devices: int
    # P99 of the seconds between two tokens of a request: alone, beside rollouts (nan: not computed)
    gap_p99_s: tuple[float, float]

    def load(self, device: int) -> tuple[Load, float]:
        """Return (load, shift in seconds) of the device with this index."""
        turn = device // len(self.loads) * len(self.loads) / max(1, self.devices)
        return self.loads[device % len(self.loads)], PIECE_S * turn


def load(served: Served, kv_tokens: int, piece_s: float = PIECE_S) -> Load:
    """Return the load of an online engine that has served these requests: for each piece of
    `piece_s` seconds the share spent computing, and the most KV held as a share of `kv_tokens`."""
    pieces = max(1, math.ceil(served.seconds / piece_s))
    edges = piece_s * np.arange(pieces + 1)
    work = np.concatenate([[0.0], np.cumsum(served.busy_s)])
    # Runs don't overlap, so the sum of work is linear within runs and constant between them.
    points = np.stack([served.began, served.ended], 1).ravel()
    done = np.interp(edges, points, np.stack([work[:-1], work[1:]], 1).ravel())
    at = np.minimum((served.at / piece_s).astype(np.int64), pieces - 1)
    return Load(
        at=edges[:-1],
        busy=np.clip(np.diff(done) / piece_s, 0.0, 1.0),
        kv=np.minimum(1.0, _most_held(served, points, edges, piece_s) / kv_tokens),
        requests=at,
        ttft_s=served.ttft_s,
        tpot_s=served.tpot_s,
        period_s=pieces * piece_s,
    )


def _most_held(served: Served, points: np.ndarray, edges: np.ndarray, piece_s: float) -> np.ndarray:
    """Return the most KV tokens held in each piece."""
    held = served.held.ravel()
    most = np.maximum(np.interp(edges[:-1], points, held), np.interp(edges[1:], points, held))
    inside = (points / piece_s).astype(np.int64)
    kept = inside < len(most)
    np.maximum.at(most, inside[kept], held[kept])
    return most


def split(trace: Trace, ways: int) -> list[Trace]:
    """Deal the trace's requests in turn to `ways` devices."""
    return [trace.part(slice(way, None, ways)) for way in range(ways)]


@dataclass(frozen=True)
class Beside:
    """The online engine while rollouts compute on its device; see `rose.parts.simulator.online`."""

    engine: Engine
    pace_s: float = 0.0
    hold_s: float = 0.0


def contended(engine: Engine, contention: float) -> Beside:
    """Return the engine beside uncontrolled rollouts: steps take 1 + `contention` times as long."""
    step = {name: c * (1 + contention) for name, c in dataclasses.asdict(engine.step).items()}
    return Beside(replace(engine, step=StepTime(**step)))


def devices(
    trace: Trace, engine: Engine, count: int, variants: int, beside: Beside | None = None
) -> Devices:
    """Return the loads of `count` devices. `trace` has the requests of `variants` devices, and the
    remaining devices repeat their loads. `beside`: the online engine beside rollouts; None:
    rollouts don't change its load."""
    parts = split(trace, variants)
    alone = [online.serve(part, engine) for part in parts]
    loads = [load(served, engine.kv_tokens) for served in alone]
    if beside is None:
        return Devices(tuple(loads), count, (online.gap_p99(alone), math.nan))
    shared = [online.serve(part, beside.engine, beside.pace_s, beside.hold_s) for part in parts]
    loads = [
        replace(own, beside=load(served, engine.kv_tokens))
        for own, served in zip(loads, shared, strict=False)
    ]
    return Devices(tuple(loads), count, (online.gap_p99(alone), online.gap_p99(shared)))


def provisioned(
    trace: Trace, engine: Engine, ttft_slo_s: float, tpot_slo_s: float, rounds: int = ROUNDS
) -> float:
    """Return the factor on the trace's times (`Trace.scaled`) at which one device without rollouts
    just meets its P99 targets: the load for which an operator would size the service. Raises
    `ValueError` if the targets are missed even at the lowest rate, or met even at the highest."""

    def meets(factor: float) -> bool:
        return (
            online.serve(trace.scaled(factor), engine).attained(ttft_slo_s, tpot_slo_s) >= ATTAINED
        )

    slow = 1.0
    while not meets(slow):
        slow *= STRIDE
        if slow > SLOWEST:
            raise ValueError(
                f"{ATTAINED:.0%} of the requests can't be within TTFT {ttft_slo_s:g} s and TPOT "
                f"{tpot_slo_s:g} s even at {1 / slow:.2g} of the rate; loosen the targets, or clip "
                "the trace"
            )
    fast = slow
    while meets(fast):
        fast /= STRIDE
        if fast < FASTEST:
            raise ValueError(
                f"{len(trace)} requests keep the targets however fast they come: too few to find "
                "the most that a device serves; give a rate (sim.serving.rate) or a longer trace"
            )
    slow = min(slow, fast * STRIDE)
    for _ in range(rounds):
        middle = math.sqrt(fast * slow)
        fast, slow = (fast, middle) if meets(middle) else (middle, slow)
    return slow
