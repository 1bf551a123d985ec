"""Step times: the fit finds the device's coefficients, and observations move it, within bounds."""

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rose.parts.lending.rules.predictor import SCALES, WINDOW, Predictor, Work
from tests.parts.lending.conftest import COEFFICIENTS


# bound by memory, both, by the host
@pytest.mark.parametrize("c0, c5", [(0.02, 0.0), (0.015, 0.005), (0.0, 0.02)])
def test_exact_steps_give_the_coefficients_back(steps, c0, c5):
    true = c0, *COEFFICIENTS[1:5], c5
    fitted = Predictor.fit(steps(400, true))
    assert fitted.coefficients == pytest.approx(true, rel=1e-3, abs=1e-8)
    assert fitted.error == pytest.approx((0.0, 1.0), abs=1e-3)
    assert fitted.seconds(Work((), 0, 0)) == fitted.p99(Work((), 0, 0)) == 0


def test_noise_is_averaged_and_told_as_error_and_page_faults_move_only_the_margin(steps):
    fitted = Predictor.fit(steps(1000, noise=0.1))
    assert fitted.coefficients == pytest.approx(COEFFICIENTS, rel=0.15, abs=1e-3)
    mape, p99 = fitted.error
    assert 0.06 < mape < 0.1 and 1.2 < p99 < 1.4  # a log-normal of 0.1: 0.08 and exp(0.233) = 1.26
    samples = enumerate(steps(400, noise=0.02))
    faults = [(work, seconds * (30 if at % 40 < 2 else 1)) for at, (work, seconds) in samples]
    fitted = Predictor.fit(faults)
    assert fitted.coefficients == pytest.approx(COEFFICIENTS, rel=0.1, abs=1e-3)
    assert fitted.error[1] > 20


def test_coefficients_are_never_negative_though_the_plain_solution_is():
    decodes = [(Work((), d, 100 * d), 0.1 - 0.001 * d) for d in range(1, 20)]
    prompts = [(n, 0.1 + n * 1e-3 - n * n * 1e-7) for n in range(100, 2000, 100)]
    fitted = Predictor.fit([*decodes, *((Work(((n, 0),), 0, 0), s) for n, s in prompts)])
    assert all(c >= 0 for c in fitted.coefficients) and fitted.coefficients[1] > 0


def test_decodes_that_a_fit_took_for_free_take_no_time_whatever_other_steps_took():
    predictor = Predictor([0.0, 1e-4, 0.0, 0.0, 1e-6, 0.0])
    predictor.observe(Work((), 4, 400), 0.01)
    predictor.observe(Work((), 1, 0), 0.01)
    assert predictor.seconds(Work((), 1, 0)) == 0 < predictor.seconds(Work((), 1, 100))


@pytest.mark.parametrize("missing, words", [(0, "of decodes alone"), (1, "with prefill")])
def test_a_fit_needs_both_kinds_of_steps(steps, missing, words):
    with pytest.raises(ValueError, match=f"0 steps {words}"):
        Predictor.fit([s for at, s in enumerate(steps(40)) if at % 2 != missing])


def test_small_and_large_steps_of_a_kind_that_are_off_by_different_factors_are_followed(predictor):
    small, middle, large = (Work((), count, 100 * count) for count in (1, 12, 40))
    other = Work(((500, 0),), 0, 0)
    bare = [predictor.seconds(work) for work in (small, middle, large, other)]
    for at in range(800):  # most steps are large: rollouts run beside few online requests
        work, fitted, factor = (small, bare[0], 1.2) if at % 8 == 0 else (large, bare[2], 0.8)
        predictor.observe(work, factor * fitted)
    assert predictor.seconds(small) == pytest.approx(1.2 * bare[0], rel=0.05)
    assert predictor.seconds(large) == pytest.approx(0.8 * bare[2], rel=0.05)
    assert 0.8 < predictor.seconds(middle) / bare[1] < 1.2
    assert predictor.seconds(other) == bare[3]


def test_a_longer_step_is_expected_to_take_longer_whatever_was_observed(predictor):
    for at in range(1000):  # the longer, the faster
        decodes = 1 + 39 * (at % 2)
        predictor.observe(Work((), decodes, 0), 0.05 if decodes == 1 else 0.02)
    times = [predictor.seconds(Work((), decodes, 0)) for decodes in range(1, 200)]
    assert times == sorted(times) and times[-1] > times[0]


def test_a_single_slow_step_widens_the_margin_and_leaves_the_mean(predictor):
    work = Work((), 4, 400)
    mean = predictor.seconds(work)
    predictor.observe(work, 1000 * mean)
    assert predictor.seconds(work) < 1.02 * mean
    assert predictor.p99(work) > 900 * mean


observed = st.tuples(st.integers(1, 100_000), st.floats(allow_nan=True, allow_infinity=True))


@settings(deadline=None)
@given(st.lists(observed, max_size=2 * WINDOW))
def test_whatever_is_observed_predictions_stay_finite_positive_and_within_the_bounds(observed):
    predictor = Predictor(COEFFICIENTS)
    works = [Work(((new, 0),), 3, 300) for new in (1, 100, 100_000)]
    bare = [predictor.seconds(work) for work in works]
    for new, seconds in observed:
        predictor.observe(Work(((new, 0),), 3, 300), seconds)
    for work, fitted in zip(works, bare, strict=True):
        assert SCALES[0] * fitted * 0.999 <= predictor.seconds(work) <= SCALES[1] * fitted * 1.001
        assert predictor.p99(work) >= predictor.seconds(work)
    assert predictor.error[0] >= 0 and predictor.error[1] >= 1


def test_the_margin_forgets(predictor):
    work = Work((), 1, 1)
    for at in range(5 * WINDOW):
        predictor.observe(work, predictor.seconds(work) * (10 if at < WINDOW else 1))
    assert predictor.p99(work) == pytest.approx(predictor.seconds(work), rel=0.1)
    assert predictor.error[0] == pytest.approx(0, abs=0.1)


def test_it_survives_json_with_its_margin_and_a_profile_from_before_c5_is_read(steps, predictor):
    fitted = Predictor.fit(steps(300, noise=0.2))
    again = Predictor.from_dict(json.loads(json.dumps(fitted.to_dict())))
    for work, _ in steps(20):
        assert again.p99(work) == pytest.approx(fitted.p99(work), rel=0.01)
    assert again.samples == 300
    old = predictor.to_dict() | {"coefficients": list(predictor.coefficients[:5])}
    assert Predictor.from_dict(old).coefficients == predictor.coefficients


BAD = [("ratios", value) for value in ([[1]], [[0.0], [1]], [["x"], []])]
BAD += [("coefficients", value) for value in ([1, 2, 3], [1, 1, 1, 1, -1], None, [0] * 5)]
BAD += [("coefficients", [math.nan] * 5)]


@pytest.mark.parametrize("key, value", BAD)
def test_what_is_no_predictor_is_refused(predictor, key, value):
    with pytest.raises(ValueError):
        Predictor.from_dict(predictor.to_dict() | {key: value})
