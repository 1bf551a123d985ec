"""The gain of one system over another, with a 95% confidence interval over seeds.

Both systems get the same episodes, traffic and machines for a seed, so that the ratios are paired.
The logarithms of the ratios are assumed normal with unknown variance (Student's t). So the mean is
geometric, and 1 / gain has the mirrored interval.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, stdev
from typing import NamedTuple

# 97.5% quantiles of Student's t with 1, 2, ... 30 degrees of freedom
T_975 = (
    *(12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469),  # definition: 1 to 6 degrees
    *(2.3646, 2.3060, 2.2622, 2.2281, 2.2010, 2.1788),  # definition: 7 to 12 degrees
    *(2.1604, 2.1448, 2.1314, 2.1199, 2.1098, 2.1009),  # definition: 13 to 18 degrees
    *(2.0930, 2.0860, 2.0796, 2.0739, 2.0687, 2.0639),  # definition: 19 to 24 degrees
    *(2.0595, 2.0555, 2.0518, 2.0484, 2.0452, 2.0423),  # definition: 25 to 30 degrees
)
NORMAL_975 = 1.95996  # definition: 97.5% quantile of the normal distribution


class Interval(NamedTuple):
    """A mean and its 95% interval; with a single seed the bounds are NaN."""

    mean: float
    low: float
    high: float


def quantile(degrees: int) -> float:
    """97.5% quantile of Student's t; Cornish-Fisher beyond the table (error below 1e-3)."""
    if degrees < 1:
        raise ValueError(f"degrees={degrees}: at least 1")
    if degrees <= len(T_975):
        return T_975[degrees - 1]
    z = NORMAL_975
    first = (z**3 + z) / (4 * degrees)  # definition: term of the expansion
    second = (5 * z**5 + 16 * z**3 + 3 * z) / (96 * degrees**2)  # definition: term of the expansion
    return z + first + second


def interval(values: Sequence[float]) -> Interval:
    """Return the mean of `values` (one per seed) with its interval."""
    mean = fmean(values)
    if len(values) < 2:
        return Interval(mean, math.nan, math.nan)
    half = quantile(len(values) - 1) * stdev(values) / math.sqrt(len(values))
    return Interval(mean, mean - half, mean + half)


def gain(ours: Sequence[float], theirs: Sequence[float]) -> Interval:
    """Return the geometric mean, and its interval, of ours / theirs (positive) over the seeds."""
    found = interval([math.log(a / b) for a, b in zip(ours, theirs, strict=True)])
    return Interval(*map(math.exp, found))
