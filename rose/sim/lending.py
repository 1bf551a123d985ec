"""What online serving leaves to a cooperative worker, and what rollouts cost online requests.

Compute: the worker lives in work time, which passes at the share of the device that it gets. Memory: the rule of
rose/coserving/budget.py. Latency: a request's mean TTFT and TPOT of its piece, stretched by the rollouts beside, with
lognormal tails. Left out: single requests; a `Load` gives their rates and means per piece.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left, bisect_right

import numpy as np

from rose.coserving.budget import HALF_LIFE_S, LOW
from rose.sim import spec
from rose.sim.result import Latency, ServingUse

FULL = 0.999  # of a device: beyond, a queue has no end
MINUTE_S = 60.0
BINS, SMALLEST, LARGEST = 600, 1e-5, 1e5  # of a histogram of latencies, s


class Pace:
    """Work time of one device: it passes at `rates` of the wall's, piecewise constant and periodic."""

    def __init__(self, load: spec.Load, rates: np.ndarray, ahead: float) -> None:
        at = np.append(load.at, load.period_s)
        self._at = load.at.tolist()
        self._rates = rates.tolist()
        self._done = np.concatenate([[0.0], np.cumsum(np.diff(at) * rates)]).tolist()
        self._period, self._total = load.period_s, self._done[-1]
        if not self._total > 0:
            raise ValueError("serving leaves no compute at all on a cooperative device")
        self._ahead = ahead

    def moved(self, ahead: float) -> Pace:
        """The same tables for another device."""
        other = object.__new__(Pace)
        other.__dict__.update(self.__dict__, _ahead=ahead)
        return other

    def work(self, wall: float) -> float:
        cycles, rest = divmod(wall + self._ahead, self._period)
        piece = bisect_right(self._at, rest) - 1
        return cycles * self._total + self._done[piece] + (rest - self._at[piece]) * self._rates[piece]

    def wall(self, work: float) -> float:
        """The earliest time at which so much is done."""
        if work == math.inf:
            return work
        cycles, rest = divmod(work, self._total)
        piece = max(bisect_left(self._done, rest) - 1, 0)
        inside = (rest - self._done[piece]) / self._rates[piece] if self._rates[piece] else 0.0
        return cycles * self._period + self._at[piece] + inside - self._ahead


def rates(serving: spec.Serving, load: spec.Load) -> np.ndarray:
    """Share of the device's compute that rollouts get in each piece while they have work."""
    if serving.executor == "gate":
        return (1 - beside(serving, load).busy) * (1 - serving.overhead)
    if serving.executor == "memory_only":
        slowed = np.minimum(load.busy * (1 + serving.contention), 1.0)  # serving computes for longer, too
        return 1 - slowed + slowed / (1 + serving.contention)
    return np.ones(len(load.at))


def beside(serving: spec.Serving, load: spec.Load) -> spec.Load:
    """What serving does while rollouts have work."""
    return load.beside if serving.executor == "gate" and load.beside is not None else load


class Changes:
    """When the KV memory that serving holds changes by `step` or more of the whole; of one `Load`."""

    def __init__(self, load: spec.Load, step: float) -> None:
        self.at, self.used, self.period = [], [], load.period_s
        for at, used in zip(load.at.tolist(), load.kv.tolist()):
            if not self.used or abs(used - self.used[-1]) >= step or (used >= 1) != (self.used[-1] >= 1):
                self.at.append(at)
                self.used.append(used)

    def used_at(self, time: float) -> float:
        return self.used[bisect_right(self.at, time % self.period) - 1]

    def after(self, time: float) -> float:
        """The next change; inf without one."""
        if len(self.at) == 1:
            return math.inf
        cycles, rest = divmod(time, self.period)
        place = bisect_right(self.at, rest)
        inside = self.at[place] if place < len(self.at) else self.period
        return max(cycles * self.period + inside, math.nextafter(time, math.inf))


class Budget:
    """Share of a device's KV memory that rollouts may hold now."""

    def __init__(self, serving: spec.Serving, changes: Changes, ahead: float) -> None:
        self._serving, self._changes, self._ahead = serving, changes, ahead
        self.share = 0.0
        self.frozen = False
        self._peak, self._looked = 0.0, -math.inf
        self.update(0.0)

    def next_change(self, now: float) -> float:
        return self._changes.after(now + self._ahead) - self._ahead

    def thaw(self) -> None:
        """A training step begins."""
        self.frozen = False

    def update(self, now: float) -> float:
        serving = self._serving
        if serving.executor == "none":
            self.share = 1.0
            return self.share
        used = self._changes.used_at(now + self._ahead)
        free = 1 - serving.reserve - used
        if serving.executor == "memory_only":
            self.share = max(0.0, free)
            return self.share
        self._peak = max(used, self._peak * 0.5 ** ((now - self._looked) / HALF_LIFE_S))
        self._looked = now
        above = max(0.0, min(serving.high_watermark - used, free))
        while self.share > above:
            self.share = self.share / 2 if self.share > serving.step / 2 else 0.0
            self.frozen = True
        if not self.frozen:
            self.share = max(self.share, min(LOW * serving.high_watermark - self._peak, free))
        return self.share


# --------------------------------------------------------------------------- latency of online requests


class Observer:
    """Gathers the latencies of one pool's devices."""

    def __init__(self, pool: str, serving: spec.Serving, seconds: float) -> None:
        self._pool, self._serving, self._seconds = pool, serving, seconds
        self._minutes = max(1, math.ceil(seconds / MINUTE_S))
        self._requests, self._attained, self._busy = (np.zeros(self._minutes) for _ in range(3))
        self._devices = 0
        self._beside = [np.zeros(BINS), np.zeros(BINS)]  # requests by mean TTFT, by mean TPOT
        self._alone = [np.zeros(BINS), np.zeros(BINS)]

    def add(self, load: spec.Load, ahead: float, spans: array) -> None:
        """`spans`: begin, end, begin, ... of the rollouts beside."""
        s = self._serving
        at, widths, piece = _unrolled(load, ahead, self._seconds)
        shared = _overlap(np.frombuffer(spans, np.float64), at, widths)
        requests = load.requests[piece] * widths / _widths(load)[piece]
        ttft, tpot, busy = load.ttft_s[piece], load.tpot_s[piece], load.busy[piece]
        slow_ttft, slow_tpot = _slowed(s, load, piece)
        for histogram, means, weights in zip([*self._alone, *self._beside, *self._beside],
                                             (ttft, tpot, ttft, tpot, slow_ttft, slow_tpot),
                                             (1, 1, 1 - shared, 1 - shared, shared, shared)):
            histogram += np.bincount(_bin(means), requests * weights, BINS)
        # a piece counts in the minute in which it begins
        minute = np.minimum((at / MINUTE_S).astype(np.int64), self._minutes - 1)
        self._requests += np.bincount(minute, requests, self._minutes)
        for means, weights in (((ttft, tpot), 1 - shared), ((slow_ttft, slow_tpot), shared)):
            both = _within(s.ttft_slo_s, means[0], s.ttft_spread) * _within(s.tpot_slo_s, means[1], s.tpot_spread)
            self._attained += np.bincount(minute, requests * weights * both, self._minutes)
        self._busy += np.bincount(minute, busy * widths, self._minutes)
        self._devices += 1

    def result(self) -> ServingUse:
        length = np.minimum(MINUTE_S, self._seconds - MINUTE_S * np.arange(self._minutes))
        with np.errstate(invalid="ignore", divide="ignore"):
            attained = self._attained / self._requests
            busy = self._busy / np.maximum(length, 1e-9) / max(1, self._devices)
        return ServingUse(self._pool, float(self._requests.sum()), self._latency(self._beside),
                          self._latency(self._alone), self._requests, attained, busy)

    def _latency(self, histograms: list[np.ndarray]) -> Latency:
        s = self._serving
        values = [(_share(h, slo, spread), _quantile(h, 0.99, spread))
                  for h, slo, spread in zip(histograms, (s.ttft_slo_s, s.tpot_slo_s), (s.ttft_spread, s.tpot_spread))]
        return Latency(values[0][0], values[1][0], values[0][1], values[1][1])


def _slowed(s: spec.Serving, load: spec.Load, piece: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(mean TTFT, mean TPOT) of requests that come while rollouts compute beside, seconds."""
    besides = beside(s, load)
    ttft, tpot = besides.ttft_s[piece], besides.tpot_s[piece]
    if s.executor == "gate":
        return (ttft, tpot) if load.beside is not None else (ttft + s.hold_s, tpot)
    if s.executor == "none":
        return ttft, tpot
    factor, busy = 1 + s.contention, load.busy[piece]
    queue = (1 - np.minimum(busy, FULL)) / np.maximum(1 - busy * factor, 1 - FULL)  # M/G/1: W ~ 1 / (1 - rho)
    return ttft * factor * np.maximum(queue, 1), tpot * factor


CENTRES = np.exp(np.linspace(math.log(SMALLEST), math.log(LARGEST), BINS))


def _bin(means: np.ndarray) -> np.ndarray:
    place = np.log(np.maximum(means, SMALLEST) / SMALLEST) / math.log(LARGEST / SMALLEST) * (BINS - 1)
    return np.minimum(np.rint(place), BINS - 1).astype(np.int64)


def _within(limit: float, means: np.ndarray, spread: float) -> np.ndarray:
    """Share of lognormal latencies with these means that stay below `limit`."""
    if spread <= 0:
        return (means <= limit).astype(float)
    return _normal((np.log(limit / np.maximum(means, SMALLEST)) + spread**2 / 2) / spread)


def _share(histogram: np.ndarray, limit: float, spread: float) -> float:
    total = histogram.sum()
    return float(histogram @ _within(limit, CENTRES, spread) / total) if total else float("nan")


def _quantile(histogram: np.ndarray, share: float, spread: float) -> float:
    """Of the mixture, by halving the interval in the logarithm."""
    if not histogram.sum():
        return float("nan")
    low, high = math.log(SMALLEST), math.log(LARGEST) + 5 * spread
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (low, middle) if _share(histogram, math.exp(middle), spread) >= share else (middle, high)
    return math.exp(high)


def _normal(z: np.ndarray) -> np.ndarray:
    """The normal distribution function; Abramowitz and Stegun 26.2.17, within 1e-7."""
    t = 1 / (1 + 0.2316419 * np.abs(z))
    poly = t * (0.319381530 + t * (-0.356563782 + t * (1.781477937 + t * (-1.821255978 + t * 1.330274429))))
    upper = np.exp(-z * z / 2) / math.sqrt(2 * math.pi) * poly
    return np.where(z >= 0, 1 - upper, upper)


def _widths(load: spec.Load) -> np.ndarray:
    return np.diff(np.append(load.at, load.period_s))


def _unrolled(load: spec.Load, ahead: float, seconds: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(begin, width, piece of the load) of the pieces within [0, seconds); the first and last are cut."""
    first, last = math.floor(ahead / load.period_s), math.floor((ahead + seconds) / load.period_s)
    begins = (load.at[None, :] + load.period_s * np.arange(first, last + 1)[:, None]).ravel() - ahead
    ends = np.append(begins[1:], (last + 1) * load.period_s - ahead)
    piece = np.tile(np.arange(len(load.at)), last + 1 - first)
    begins, ends = np.clip(begins, 0, seconds), np.clip(ends, 0, seconds)
    kept = ends > begins
    return begins[kept], (ends - begins)[kept], piece[kept]


def _overlap(spans: np.ndarray, at: np.ndarray, widths: np.ndarray) -> np.ndarray:
    """Share of each interval that lies within the spans."""
    if not len(spans):
        return np.zeros(len(at))
    lengths = np.concatenate([[0.0], np.cumsum(spans[1::2] - spans[::2])])
    edges, covered = spans, np.repeat(lengths, 2)[1:-1]  # the covered time before each edge
    return (np.interp(at + widths, edges, covered) - np.interp(at, edges, covered)) / widths
