"""Gains over seeds: paired, with Student's intervals."""

import math

import numpy as np
import pytest

from rose.parts.simulator.study.gains import gain, interval, quantile


def test_gains_are_of_pairs_of_seeds():
    """Seeds that differ a lot, but alike for both systems, don't widen the interval."""
    base = np.array([1.0, 10.0, 100.0])
    assert gain(1.5 * base, base) == pytest.approx((1.5, 1.5, 1.5))
    a, b = [3.0, 4.0, 6.0], [2.0, 3.5, 4.0]
    mean, low, high = gain(a, b)
    assert gain(b, a) == pytest.approx((1 / mean, 1 / high, 1 / low))


def test_the_interval_covers_the_true_ratio_in_about_95_of_100_experiments():
    draw = np.random.default_rng(1)
    hits = 0
    for _ in range(2000):
        theirs = draw.lognormal(0, 0.5, 5)
        low, high = gain(1.3 * theirs * draw.lognormal(0, 0.1, 5), theirs)[1:]
        hits += low <= 1.3 <= high
    assert 0.93 < hits / 2000 < 0.97


def test_one_seed_has_no_interval():
    mean, low, high = interval([3.0])
    assert mean == 3.0 and math.isnan(low) and math.isnan(high)


def test_student_s_quantile_joins_the_normal_one_without_a_step():
    assert quantile(31) == pytest.approx(2.0395, abs=1e-3)
    assert quantile(1000) == pytest.approx(1.9623, abs=1e-3)
