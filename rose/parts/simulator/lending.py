"""Co-serving in the simulation: how much of a device online serving leaves to a cooperative worker,
and what rollouts cost online requests.

- Compute: the worker runs in work time. It passes at the share of the device that the worker gets.
- Memory: the rule of rose/parts/lending/rules/budget.py.
- Latency: each request has latencies without rollouts and latencies beside rollouts. A `spec.Load`
  divides time into pieces. The weights of the request's latencies are the shares of its piece
  without and with rollouts.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left, bisect_right

import numpy as np

from rose.parts.lending.rules.budget import HALF_LIFE_S, LOW
from rose.parts.simulator import spec
from rose.parts.simulator.online import P99
from rose.parts.simulator.result import Latency, ServingUse

# (TTFT, TPOT) of the requests of a load, (requests,) each, seconds. A request of one token has TPOT
# nan.
Latencies = tuple[np.ndarray, np.ndarray]
MINUTE_S = 60.0  # definition: seconds of a minute


class Pace:
    """The work time of a device, in seconds of computing. `rates` has its speed in each piece of
    the load, which repeats. `offset_s`: position in the load's period at simulated time 0."""

    def __init__(self, load: spec.Load, rates: np.ndarray, offset_s: float) -> None:
        at = np.append(load.at, load.period_s)
        self._at = load.at.tolist()
        self._rates = rates.tolist()
        self._done = np.concatenate([[0.0], np.cumsum(np.diff(at) * rates)]).tolist()
        self._period, self._total = load.period_s, self._done[-1]
        if not self._total > 0:
            raise ValueError("serving leaves no compute at all on a cooperative device")
        self._offset_s = offset_s

    def moved(self, offset_s: float) -> Pace:
        """Return the pace of a device with the same load and another offset."""
        other = object.__new__(Pace)
        other.__dict__.update(self.__dict__, _offset_s=offset_s)
        return other

    def work(self, wall: float) -> float:
        """Return the work time at this simulated time."""
        cycles, rest = divmod(wall + self._offset_s, self._period)
        piece = bisect_right(self._at, rest) - 1
        return (
            cycles * self._total + self._done[piece] + (rest - self._at[piece]) * self._rates[piece]
        )

    def wall(self, work: float) -> float:
        """Return the earliest simulated time at this work time."""
        if work == math.inf:
            return work
        cycles, rest = divmod(work, self._total)
        piece = max(bisect_left(self._done, rest) - 1, 0)
        inside = (rest - self._done[piece]) / self._rates[piece] if self._rates[piece] else 0.0
        return cycles * self._period + self._at[piece] + inside - self._offset_s


def rates(serving: spec.Serving, load: spec.Load) -> np.ndarray:
    """Share of the device's compute that rollouts get while they have work, (pieces,)."""
    busy = beside(load).busy
    if serving.executor == "gate":
        return (1 - busy) * (1 - serving.overhead)
    if serving.executor == "memory_only":
        return 1 - busy + busy / (1 + serving.contention)
    return np.ones(len(load.at))


def beside(load: spec.Load) -> spec.Load:
    """Return the load of serving while rollouts have work."""
    return load.beside if load.beside is not None else load


class Changes:
    """The changes over time of the share of KV memory that serving holds under one `Load`. Changes
    below `step` are left out, except those to or from a full cache."""

    def __init__(self, load: spec.Load, step: float) -> None:
        self.at, self.used, self.period = [], [], load.period_s
        for at, used in zip(load.at.tolist(), load.kv.tolist(), strict=False):
            if (
                not self.used
                or abs(used - self.used[-1]) >= step
                or (used >= 1) != (self.used[-1] >= 1)
            ):
                self.at.append(at)
                self.used.append(used)

    def used_at(self, time: float) -> float:
        return self.used[bisect_right(self.at, time % self.period) - 1]

    def after(self, time: float) -> float:
        """Return the time of the next change, or inf if there is none."""
        if len(self.at) == 1:
            return math.inf
        cycles, rest = divmod(time, self.period)
        place = bisect_right(self.at, rest)
        inside = self.at[place] if place < len(self.at) else self.period
        return max(cycles * self.period + inside, math.nextafter(time, math.inf))


class Budget:
    """The share of a device's KV memory that rollouts may hold; it can't grow while `frozen`.
    `offset_s`: as in `Pace`."""

    def __init__(self, serving: spec.Serving, changes: Changes, offset_s: float) -> None:
        self._serving, self._changes, self._offset_s = serving, changes, offset_s
        self.share = 0.0
        self.frozen = False
        self._peak = 0.0  # peak share that serving held, halved every HALF_LIFE_S
        self._updated_at = -math.inf
        self.update(0.0)

    def next_change(self, now: float) -> float:
        return self._changes.after(now + self._offset_s) - self._offset_s

    def thaw(self) -> None:
        """Allow growth again, as a training step begins."""
        self.frozen = False

    def update(self, now: float) -> float:
        """Set the share by the memory that serving holds now, and return it."""
        serving = self._serving
        if serving.executor == "none":
            self.share = 1.0
            return self.share
        used = self._changes.used_at(now + self._offset_s)
        free = 1 - serving.reserve - used
        if serving.executor == "memory_only":
            self.share = max(0.0, free)
            return self.share
        self._peak = max(used, self._peak * 0.5 ** ((now - self._updated_at) / HALF_LIFE_S))
        self._updated_at = now
        above = max(0.0, min(serving.high_watermark - used, free))
        while self.share > above:
            self.share = self.share / 2 if self.share > serving.step / 2 else 0.0
            self.frozen = True
        if not self.frozen:
            self.share = max(self.share, min(LOW * serving.high_watermark - self._peak, free))
        return self.share


class Observer:
    """An accumulator of the latencies on one pool's devices."""

    def __init__(self, pool: str, serving: spec.Serving, seconds: float) -> None:
        self._pool, self._serving, self._seconds = pool, serving, seconds
        self._minutes = max(1, math.ceil(seconds / MINUTE_S))
        self._requests = np.zeros(self._minutes)
        self._attained, self._busy = np.zeros(self._minutes), np.zeros(self._minutes)
        self._devices = 0
        self._lent = 0.0  # sum over the devices
        # id of a load -> (load, (2, pieces) occurrences of each piece without and with rollouts)
        self._weights: dict[int, tuple[spec.Load, np.ndarray]] = {}

    def add(self, load: spec.Load, offset_s: float, spans: array) -> None:
        """Add a device. `spans` has the begin, end, begin, ... of its rollouts."""
        at, widths, piece = _unrolled(load, offset_s, self._seconds)
        shared = _overlap(np.frombuffer(spans, np.float64), at, widths)
        times = widths / _widths(load)[piece]
        count = len(load.at)
        both = np.stack(
            [np.bincount(piece, times * weights, count) for weights in (1 - shared, shared)]
        )
        self._weights[id(load)] = load, self._weights.get(id(load), (load, 0))[1] + both
        minute = np.minimum((at / MINUTE_S).astype(np.int64), self._minutes - 1)
        self._requests += np.bincount(
            minute, np.bincount(load.requests, None, count)[piece] * times, self._minutes
        )
        for (ttft, tpot), weights in (
            (_latencies(load), 1 - shared),
            (_latencies(beside(load)), shared),
        ):
            met = (ttft <= self._serving.ttft_slo_s) & ~(tpot > self._serving.tpot_slo_s)
            met = np.bincount(load.requests, met, count)
            self._attained += np.bincount(minute, met[piece] * times * weights, self._minutes)
        self._busy += np.bincount(minute, load.busy[piece] * widths, self._minutes)
        self._devices += 1
        self._lent += float(rates(self._serving, load) @ _widths(load)) / load.period_s

    def result(self) -> ServingUse:
        """Return the use of all devices added so far."""
        length = np.minimum(MINUTE_S, self._seconds - MINUTE_S * np.arange(self._minutes))
        with np.errstate(invalid="ignore", divide="ignore"):
            attained = self._attained / self._requests
            shortest = 1e-9  # numerics: no division by zero in a last minute of no length
            busy = self._busy / np.maximum(length, shortest) / max(1, self._devices)
        mixed, alone = [], []  # (latencies, weight of each request) of the loads
        for load, (without, beside_rollouts) in self._weights.values():
            without, beside_rollouts = without[load.requests], beside_rollouts[load.requests]
            mixed += [(_latencies(load), without), (_latencies(beside(load)), beside_rollouts)]
            alone.append((_latencies(load), without + beside_rollouts))
        return ServingUse(
            self._pool,
            float(self._requests.sum()),
            self._latency(mixed),
            self._latency(alone),
            self._requests,
            attained,
            busy,
            self._lent / max(1, self._devices),
            self._serving.gap_p99_s,
        )

    def _latency(self, parts: list[tuple[Latencies, np.ndarray]]) -> Latency:
        """Return the latency over all requests of `parts`: (latencies, weight of each request)."""
        weights = np.concatenate([each for _, each in parts]) if parts else np.zeros(0)
        found = []
        for which, slo in enumerate((self._serving.ttft_slo_s, self._serving.tpot_slo_s)):
            values = np.concatenate([both[which] for both, _ in parts]) if parts else np.zeros(0)
            found.append(_share_and_p99(values[(known := ~np.isnan(values))], weights[known], slo))
        return Latency(found[0][0], found[1][0], found[0][1], found[1][1])


def _latencies(load: spec.Load) -> Latencies:
    return load.ttft_s, load.tpot_s


def _share_and_p99(values: np.ndarray, weights: np.ndarray, limit: float) -> tuple[float, float]:
    """Return (share up to `limit`, 99th percentile) of weighted values; nan without weight."""
    if not weights.sum():
        return math.nan, math.nan
    order = np.argsort(values)
    upto = np.cumsum(weights[order])
    place = min(int(np.searchsorted(upto, P99 * upto[-1])), len(values) - 1)
    return float(weights @ (values <= limit) / upto[-1]), float(values[order][place])


def _widths(load: spec.Load) -> np.ndarray:
    """Return the seconds of each piece of the load."""
    return np.diff(np.append(load.at, load.period_s))


def _unrolled(
    load: spec.Load, offset_s: float, seconds: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Repeat the load over [0, seconds). Return (begin, width, index in the load) of each piece,
    cut to this span."""
    period_s = load.period_s
    first, last = math.floor(offset_s / period_s), math.floor((offset_s + seconds) / period_s)
    begins = (load.at[None, :] + period_s * np.arange(first, last + 1)[:, None]).ravel() - offset_s
    ends = np.append(begins[1:], (last + 1) * period_s - offset_s)
    piece = np.tile(np.arange(len(load.at)), last + 1 - first)
    begins, ends = np.clip(begins, 0, seconds), np.clip(ends, 0, seconds)
    kept = ends > begins
    return begins[kept], (ends - begins)[kept], piece[kept]


def _overlap(spans: np.ndarray, at: np.ndarray, widths: np.ndarray) -> np.ndarray:
    """Return the share of each interval that lies within the spans."""
    if not len(spans):
        return np.zeros(len(at))
    lengths = np.concatenate([[0.0], np.cumsum(spans[1::2] - spans[::2])])
    edges, covered = spans, np.repeat(lengths, 2)[1:-1]  # the covered time before each edge
    return (np.interp(at + widths, edges, covered) - np.interp(at, edges, covered)) / widths
