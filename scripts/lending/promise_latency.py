"""Compare online users' latency beside rollouts with that of serving alone. Pure; not a command.

Both sides get the same requests at the same times. Counted are those that came while both sides
ran. A request that isn't answered counts as infinitely late.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

SLACK = 1.25  # targets of lending, as multiples of the latencies of serving alone
# Seconds of traffic that are drawn together, because requests of one burst are not independent.
WINDOW_S = 20.0
DRAWS = 2000
NAMES = {"ttft": "TTFT", "tpot": "TPOT"}
PERCENTILES = (50, 99)


class Request(NamedTuple):
    """An online request: its time and latencies in seconds. A single token has no TPOT."""

    at: float
    ttft: float
    tpot: float | None


class Ratio(NamedTuple):
    """A percentile alone and beside rollouts, in seconds, and their ratio with its 95% interval."""

    name: str
    alone: float
    beside: float
    ratio: float
    low: float
    high: float


def requests(run: Mapping[str, Any], until: float = math.inf) -> list[Request]:
    """Return the requests of a run that came before `until`."""
    found = []
    for at, ttft, tpot, done in run["requests"]:
        if at < until:
            found.append(Request(at, ttft, tpot) if done else Request(at, math.inf, math.inf))
    return found


def percentile(found: Sequence[Request], key: str, percent: int) -> float:
    """Return a percentile of `ttft` or `tpot`, infinite without requests."""
    values = [value for one in found if (value := getattr(one, key)) is not None]
    return float(np.percentile(values, percent, method="higher")) if values else math.inf


def targets(alone: Mapping[str, Any]) -> dict[str, float]:
    """Return the targets of serving.online.slo: `SLACK` times what serving alone gave."""
    found = requests(alone)
    return {
        f"{key}_p{percent}_s": round(SLACK * percentile(found, key, percent), 4)
        for key in NAMES
        for percent in PERCENTILES
    }


def ratios(pairs: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]]) -> list[Ratio]:
    """Compare the runs of each seed, (alone, beside), all seeds together.

    The interval is a bootstrap over pieces of `WINDOW_S` seconds of the traffic, the same pieces on
    both sides.
    """
    sides = [_pieces(pairs, number) for number in range(2)]
    count = 1 + max((piece for side in sides for piece, _ in side), default=0)
    once: np.ndarray = np.ones((1, count), dtype=int)
    drawn = np.random.default_rng(0).multinomial(count, np.full(count, 1 / count), DRAWS)
    found = []
    for key, name in NAMES.items():
        for percent in PERCENTILES:
            alone, beside = (_percentiles(side, key, percent, once)[0] for side in sides)
            with np.errstate(invalid="ignore"):
                all_drawn = np.divide(*(_percentiles(s, key, percent, drawn) for s in sides[::-1]))
            low, high = np.nanquantile(all_drawn, (0.025, 0.975), method="nearest")
            bounds = float(beside / alone), float(low), float(high)
            found.append(Ratio(f"{name} P{percent}", float(alone), float(beside), *bounds))
    return found


def common_s(alone: Mapping[str, Any], beside: Mapping[str, Any]) -> float:
    """Return the seconds of traffic that both runs had."""
    return min(alone["served_s"], beside["served_s"])


def _pieces(
    pairs: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]], side: int
) -> list[tuple[int, Request]]:
    """Return the requests of one side of all seeds, each with the number of its piece."""
    found, first = [], 0
    for pair in pairs:
        until = common_s(*pair)
        found += [(first + int(r.at // WINDOW_S), r) for r in requests(pair[side], until)]
        first += math.ceil(until / WINDOW_S)
    return found


def _percentiles(
    side: Sequence[tuple[int, Request]], key: str, percent: int, times: np.ndarray
) -> np.ndarray:
    """Return a percentile for each row of `times`, which says how often each piece counts.

    It is the value at rank p (n - 1), rounded up, as numpy's method "higher"; infinite without
    requests.
    """
    rows = [(value, at) for at, one in side if (value := getattr(one, key)) is not None]
    rows.sort()
    values = np.array([value for value, _ in rows] + [math.inf])
    weights = times[:, [at for _, at in rows]]  # (rows of times, requests)
    upto = weights.cumsum(axis=1)
    count = weights.sum(axis=1, keepdims=True)
    rank = np.ceil(percent / 100 * (count - 1))
    return values[np.where(count[:, 0] > 0, (upto <= rank).sum(axis=1), len(rows))]
