"""What is drawn of a run's spans."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose.parts.simulator.study.outcome import shares


def test_shares_of_bins_are_what_the_spans_cover():
    spans = np.array([[1.0, 3.0], [3.5, 4.0], [7.0, 9.5]])
    assert shares(spans, 10.0, 5) == [0.5, 0.75, 0.0, 0.5, 0.75]
    assert shares(np.zeros((0, 2)), 10.0, 3) == [0.0, 0.0, 0.0]


@given(st.lists(st.floats(0.01, 5.0), min_size=2, max_size=40), st.integers(1, 50))
def test_bins_sum_to_the_covered_time(gaps, bins):
    at = np.cumsum(gaps[: len(gaps) // 2 * 2])
    spans = at.reshape(-1, 2)
    end = float(at[-1]) + 1.0
    covered = sum(shares(spans, end, bins)) * end / bins
    assert covered == pytest.approx(float((spans[:, 1] - spans[:, 0]).sum()), abs=0.006 * end)
