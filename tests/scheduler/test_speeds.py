"""Fits of the workers' speeds."""

import numpy as np
import pytest

from rose.policies.speeds import LeastSquares, project


def test_a_fit_has_no_negative_coefficients():
    fit = LeastSquares()
    draw = np.random.default_rng(1)
    for _ in range(200):  # Shorter turns run in fuller engines, so seconds fall with the output.
        output = draw.uniform(0.1, 1.0)
        fit.update((output, output * 2, 0.5), 2.0 - output)
        assert min(fit.weights) >= 0
    assert fit.predict((1.0, 2.0, 0.5)) > 0


def test_a_negative_coefficient_is_dropped_and_the_others_are_fitted_again():
    draw = np.random.default_rng(2)
    x = draw.uniform(0.0, 1.0, (50, 3))
    y = x @ [2.0, -0.5, 1.0]
    p = np.linalg.inv(x.T @ x)
    w = project(tuple(p @ x.T @ y), (p[0, 0], p[0, 1], p[0, 2], p[1, 1], p[1, 2], p[2, 2]))
    alone = np.linalg.lstsq(x[:, [0, 2]], y, rcond=None)[0]
    assert w == pytest.approx((alone[0], 0.0, alone[1]))
