"""Intervals for success rates: Wilson's for one rate, Newcombe's for a difference of two."""

from __future__ import annotations

import math

Z_95 = 1.959963984540054  # two-sided 95% quantile of the standard normal


def wilson_interval(successes: int, n: int, z: float = Z_95) -> tuple[float, float]:
    """Score interval (low, high) of a binomial rate (Wilson 1927); (0, 1) when nothing was tried.

    Raises ValueError unless 0 <= successes <= n.
    """
    if not 0 <= successes <= n:
        raise ValueError(f"successes={successes} of n={n}: needs 0 <= successes <= n")
    if n == 0:
        return 0.0, 1.0
    rate, square = successes / n, z * z
    center = (rate + square / (2 * n)) / (1 + square / n)
    half = z / (1 + square / n) * math.sqrt(rate * (1 - rate) / n + square / (4 * n * n))
    low = 0.0 if successes == 0 else center - half
    return low, 1.0 if successes == n else center + half


def difference_interval(
    before: tuple[int, int], after: tuple[int, int], z: float = Z_95
) -> tuple[float, float]:
    """Interval of rate(after) - rate(before), each (successes, n) with n > 0 (Newcombe 1998, method
    10)."""
    p1, p2 = before[0] / before[1], after[0] / after[1]
    (l1, u1), (l2, u2) = wilson_interval(*before, z), wilson_interval(*after, z)
    gain = p2 - p1
    return gain - math.hypot(p2 - l2, u1 - p1), gain + math.hypot(u2 - p2, p1 - l1)
