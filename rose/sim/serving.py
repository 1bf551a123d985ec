"""Online serving on the devices of a cooperative pool: from a request trace to `rose.sim.spec.Devices`.

Requests of one service go to its devices in turn, as a load balancer deals them, so that the devices' bursts are those
of the service: peaks come to all of them at once. A few devices are computed (`variants`) and stand for the others.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from operator import attrgetter

import numpy as np

from rose.sim import online
from rose.sim.online import Served
from rose.sim.spec import Engine, Load
from rose.traces import Trace

PIECE_S = 1.0
ATTAINED = 0.99  # of the requests: a P99 target


@dataclass(frozen=True)
class Devices:
    """Device i has the load of variant i mod len(loads), and is ahead by a part of a piece, so that not all devices
    change at the same instant."""

    loads: tuple[Load, ...]
    devices: int
    ttft_spread: float  # sigma of the logarithm of requests' latencies, alone, about their piece's mean
    tpot_spread: float

    def load(self, device: int) -> tuple[Load, float]:
        turn = device // len(self.loads) * len(self.loads) / max(1, self.devices)
        return self.loads[device % len(self.loads)], PIECE_S * turn


def load(served: Served, kv_tokens: int, piece_s: float = PIECE_S) -> Load:
    """What S did in each piece: share of it spent computing, most KV held as a share of `kv_tokens`, requests that came
    and their mean TTFT and TPOT; a piece without requests has those of the whole trace."""
    pieces = max(1, math.ceil(served.seconds / piece_s))
    edges = piece_s * np.arange(pieces + 1)
    work = np.concatenate([[0.0], np.cumsum(served.busy_s)])
    # runs don't overlap: computing done by a time is linear within a run and constant between runs
    points = np.stack([served.began, served.ended], 1).ravel()
    done = np.interp(edges, points, np.stack([work[:-1], work[1:]], 1).ravel())
    at = np.minimum((served.at / piece_s).astype(np.int64), pieces - 1)
    count = np.bincount(at, minlength=pieces)
    return Load(at=edges[:-1], busy=np.clip(np.diff(done) / piece_s, 0.0, 1.0),
                kv=np.minimum(1.0, _most(served, points, edges, piece_s) / kv_tokens), requests=count.astype(float),
                ttft_s=_means(served.ttft_s, at, count), tpot_s=_means(served.tpot_s, at, count),
                period_s=pieces * piece_s)


def _most(served: Served, points: np.ndarray, edges: np.ndarray, piece_s: float) -> np.ndarray:
    """Most tokens held in each piece."""
    held = served.held.ravel()
    most = np.maximum(np.interp(edges[:-1], points, held), np.interp(edges[1:], points, held))
    inside = (points / piece_s).astype(np.int64)
    kept = inside < len(most)
    np.maximum.at(most, inside[kept], held[kept])
    return most


def _means(values: np.ndarray, at: np.ndarray, count: np.ndarray) -> np.ndarray:
    known = ~np.isnan(values)
    sums = np.bincount(at[known], values[known], len(count))
    number = np.bincount(at[known], minlength=len(count))
    whole = float(values[known].mean()) if known.any() else 0.0
    return np.where(number > 0, sums / np.maximum(number, 1), whole)


def spread(values: np.ndarray, at: np.ndarray, piece_s: float = PIECE_S) -> float:
    """Sigma of the logarithm of requests' latencies about their piece's mean."""
    known = values > 0
    piece = (at[known] / piece_s).astype(np.int64)
    logs = np.log(values[known])
    count = np.bincount(piece)
    means = np.bincount(piece, logs) / np.maximum(count, 1)
    free = known.sum() - (count > 0).sum()  # each piece's mean takes one degree of freedom
    return float(math.sqrt(((logs - means[piece]) ** 2).sum() / free)) if free > 0 else 0.0


# --------------------------------------------------------------------------- a service


def split(trace: Trace, ways: int) -> list[Trace]:
    """Its requests dealt to so many devices in turn."""
    return [Trace(trace.at[way::ways], trace.prompt_tokens[way::ways], trace.output_tokens[way::ways])
            for way in range(ways)]


def devices(trace: Trace, engine: Engine, count: int, variants: int, pace_s: float = 0.0,
            hold_s: float = 0.0) -> Devices:
    """`trace`: of `variants` devices together; `count`: devices that there are. With `pace_s`, a share of the
    TPOT target, also what they do beside rollouts whose steps take up to `hold_s` (see `rose.sim.online`)."""
    parts = split(trace, variants)
    served = [online.serve(part, engine) for part in parts]
    loads = [load(found, engine.kv_tokens) for found in served]
    if pace_s:
        loads = [replace(alone, beside=load(online.serve(part, engine, pace_s, hold_s), engine.kv_tokens))
                 for alone, part in zip(loads, parts)]
    ttft, tpot = (float(np.mean([spread(values(found), found.at) for found in served]))
                  for values in (attrgetter("ttft_s"), attrgetter("tpot_s")))
    return Devices(tuple(loads), count, ttft, tpot)


def provisioned(trace: Trace, engine: Engine, ttft_slo_s: float, tpot_slo_s: float, rounds: int = 7) -> float:
    """Factor of the trace's times (`Trace.scaled`) at which one device, alone, just meets its P99 targets: what an
    operator who sizes the service by its peaks would give it. Bisected in the logarithm, to 1.7 %.
    Raises `ValueError` if even single requests miss the targets, or all at once keep them."""
    def meets(factor: float) -> bool:
        return online.serve(trace.scaled(factor), engine).attained(ttft_slo_s, tpot_slo_s) >= ATTAINED

    slow = 1.0
    while not meets(slow):
        slow *= 4
        if slow > 4**6:
            raise ValueError(f"{ATTAINED:.0%} of the requests can't be within TTFT {ttft_slo_s:g} s and TPOT "
                             f"{tpot_slo_s:g} s even at {1 / slow:.2g} of the rate; loosen the targets, or clip "
                             "the trace")
    fast = slow
    while meets(fast):
        fast /= 4
        if fast < 4**-12:
            raise ValueError(f"{len(trace)} requests keep the targets however fast they come: too few to find the most "
                             "that a device serves; give a rate (sim.serving.rate) or a longer trace")
    slow = min(slow, fast * 4)
    for _ in range(rounds):
        middle = math.sqrt(fast * slow)
        fast, slow = (fast, middle) if meets(middle) else (middle, slow)
    return slow
