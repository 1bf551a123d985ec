"""Predict the duration of an engine step from its work. In this module, a step is an engine step.

T = max(c0, c1 P + c2 sum(P_i ctx_i)) + c3 D + c4 sum(ctx_decode) + c5, with all c >= 0. P is the
number of prompt tokens, in chunks of P_i; a token of chunk i attends to ctx_i tokens on average. D
is the number of decodes. c0 is the time to read the weights once. Every step takes it, and prefill
adds time only beyond it. c5 is the fixed cost of every step.

The coefficients are fitted on the device (rose.parts.lending.profile), which gives T, the fitted
time of a step. Every observed step then updates two things: the scale, a slowly moving factor on T
that may differ for short and long steps, and the last ratios of measured to predicted time, which
give the P99. Steps with prefill and steps that only decode have their own, because their noise
differs. Pure; not thread-safe.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

WINDOW = 512  # residuals kept for each kind of step; the sixth largest is their P99
SEEDS = 128  # most residuals of each kind that a profile stores
RATE = 0.02  # weight of one step in the scale, which follows half of a lasting change in 35 steps
# Largest ratio with which one step counts in the scale, so that one slow step moves it little.
MOST_RATIO = 2.0
SCALES = (0.25, 4.0)  # least and most scale; only another machine's profile would need more
LOG_SCALES = tuple(map(math.log, SCALES))
# Regularization of the scale's slope: the variance of log step times at which it is half of the
# least-squares slope.
SPREAD = 0.005
# Largest slope of the log scale over the log time, in either direction. As it is below 1, a longer
# fitted time always gives a longer prediction.
SLOPE = 0.5
KEPT = 0.95  # share of the samples used by the last fits; the others count as outliers
SHORTEST = 1e-6  # seconds; no step takes less
# Most rounds in which a fit decides for each sample whether c0 or the prefill is larger; 2 to 5 do.
ROUNDS = 20
MEAN_ROUNDS = 5  # rounds in which `fit_mean` weights samples by the last fit


class Work(NamedTuple):
    """The work of one engine step."""

    prefill: tuple[tuple[int, int], ...]  # (new tokens, context before) of each prefill chunk
    decodes: int
    decode_context: int  # context tokens, summed over decodes

    @property
    def tokens(self) -> int:
        return self.decodes + sum(new for new, _ in self.prefill)


class Predictor:
    """Predicts step times. `coefficients` are c0 to c5 in seconds; c5 may be left out (0). `ratios`
    are initial measured / predicted times of steps that only decode, and of steps with prefill.
    Raises `ValueError` unless the coefficients are five or six finite numbers >= 0."""

    def __init__(
        self,
        coefficients: Sequence[float],
        ratios: tuple[Iterable[float], Iterable[float]] = ((), ()),
        samples: int = 0,
    ) -> None:
        if len(coefficients) not in (5, 6) or not all(
            math.isfinite(c) and c >= 0 for c in coefficients
        ):
            raise ValueError(
                f"coefficients {list(coefficients)!r}: must be six finite numbers >= 0"
            )
        if not any(coefficients):
            raise ValueError("coefficients are all zero: no step takes no time")
        self.coefficients = tuple(float(c) for c in (*coefficients, 0.0)[:6])
        self.samples = samples  # number of steps that the coefficients were fitted to
        self._kinds = (_Residuals(ratios[0]), _Residuals(ratios[1]))

    def seconds(self, work: Work) -> float:
        """Predict the mean time; 0 for a step without work. Takes about 2 microseconds."""
        if not work.prefill and not work.decodes:
            return 0.0
        bare = self._bare(work)
        return bare * self._kinds[bool(work.prefill)].scale(bare) if bare > 0 else 0.0

    def p99(self, work: Work) -> float:
        """Predict the P99 time: the mean times the margin."""
        return self.seconds(work) * self.margin(work)

    def margin(self, work: Work) -> float:
        """The 99th percentile of measured / predicted time of this kind of step, at least 1."""
        return self._kinds[bool(work.prefill)].p99

    def observe(self, work: Work, seconds: float) -> None:
        """Refine the prediction with a measured step, unless its time is impossible."""
        bare = self._bare(work) if work.tokens else 0.0
        if bare > 0 and math.isfinite(seconds) and seconds >= SHORTEST:
            self._kinds[bool(work.prefill)].add(bare, seconds)

    @property
    def error(self) -> tuple[float, float]:
        """Mean of |predicted - measured| / measured, and 99th percentile of measured / predicted,
        both over the last steps."""
        count = sum(len(kind.last) for kind in self._kinds)
        mape = sum(kind.absolute for kind in self._kinds) / count if count else 0.0
        return max(0.0, mape), max(kind.p99 for kind in self._kinds)

    def _bare(self, work: Work) -> float:
        """Return the fitted time T in seconds, without the scale."""
        c0, c1, c2, c3, c4, c5 = self.coefficients
        cost = 0.0
        for new, before in work.prefill:
            cost += new * (c1 + c2 * (before + new / 2))
        return max(c0, cost) + c3 * work.decodes + c4 * work.decode_context + c5

    @classmethod
    def fit(cls, samples: list[tuple[Work, float]]) -> Predictor:
        """Fit by least squares of the relative error, without the 5% of samples that fit worst.
        Raises `ValueError` when there are too few samples with prefill or of decodes only."""
        samples = _usable(samples)
        kept, fitted = samples, None
        for _ in range(3):
            fitted = cls(_fit(kept, [seconds for _, seconds in kept]))
            by_error = sorted(samples, key=lambda s: abs(math.log(s[1] / fitted.seconds(s[0]))))
            kept = _enough_of_both(by_error)
        return cls(fitted.coefficients, _ratios(fitted, samples), len(samples))

    @classmethod
    def fit_mean(cls, samples: list[tuple[Work, float]]) -> Predictor:
        """Fit the mean time of steps, outliers included, to predict the total time of many steps.
        Minimizes the squares of errors relative to the predicted time. `fit` takes them relative to
        the measured time, which biases it to short times if steps are noisy. Raises as `fit`."""
        samples = _usable(samples)
        scale = [1.0] * len(samples)
        for _ in range(MEAN_ROUNDS):
            fitted = cls(_fit(samples, scale))
            scale = [fitted.seconds(work) for work, _ in samples]
        return cls(fitted.coefficients, _ratios(fitted, samples), len(samples))

    def to_dict(self) -> dict[str, Any]:
        """Convert to a dictionary for JSON, with the residuals. The scale learnt since the fit is
        left out: `from_dict` begins with 1."""
        mape, p99 = self.error
        return {
            "coefficients": list(self.coefficients),
            "samples": self.samples,
            "mape": mape,
            "p99": p99,
            "ratios": [_quantiles(kind.ordered) for kind in self._kinds],
        }

    @classmethod
    def from_dict(cls, found: dict[str, Any]) -> Predictor:
        """Build a predictor from a result of `to_dict`. Raises `ValueError` for other data."""
        try:
            ratios = [[float(ratio) for ratio in kind] for kind in found["ratios"]]
            if len(ratios) != 2 or not all(
                math.isfinite(r) and r > 0 for kind in ratios for r in kind
            ):
                raise ValueError("ratios must be two lists of finite numbers > 0")
            return cls(
                [float(c) for c in found["coefficients"]],
                (ratios[0], ratios[1]),
                int(found["samples"]),
            )
        except (KeyError, TypeError) as error:
            raise ValueError(f"not a step-time predictor: {error!r}") from None


class _Residuals:
    """The last ratios of measured to predicted time of one kind of step, and the scale, the
    expected ratio of measured to fitted time. Its log is a straight line over the log of the fitted
    time, fitted by least squares with exponential forgetting. One factor for all steps would be a
    compromise that suits neither small nor large ones."""

    def __init__(self, ratios: Iterable[float]) -> None:
        self.last = deque(ratios, maxlen=WINDOW)
        self.ordered = sorted(self.last)
        self.absolute = sum(abs(1 - 1 / ratio) for ratio in self.last)
        self.p99 = self._p99()
        # Below, x is log(fitted time) and y is log(measured / fitted time).
        self._at: float | None = None  # mean of x; None before the first step
        self._level = 0.0  # mean of y
        self._variance = 0.0  # variance of x
        self._covariance = 0.0  # covariance of x and y
        self._slope = 0.0

    def scale(self, bare: float) -> float:
        """Return the expected measured / fitted time of a step with the fitted time `bare`."""
        level = (
            self._level
            if self._at is None
            else self._level + self._slope * (math.log(bare) - self._at)
        )
        return math.exp(min(max(level, LOG_SCALES[0]), LOG_SCALES[1]))

    def add(self, bare: float, seconds: float) -> None:
        """Count a step that took `seconds` and whose fitted time is `bare`."""
        scale = self.scale(bare)
        self._keep(ratio := seconds / (bare * scale))
        x, y = math.log(bare), math.log(scale * min(max(ratio, 1 / MOST_RATIO), MOST_RATIO))
        self._at = x if self._at is None else self._at
        dx, dy = x - self._at, y - self._level
        self._at += RATE * dx
        self._level = min(max(self._level + RATE * dy, LOG_SCALES[0]), LOG_SCALES[1])
        self._variance = (1 - RATE) * (self._variance + RATE * dx * dx)
        self._covariance = (1 - RATE) * (self._covariance + RATE * dx * dy)
        self._slope = min(max(self._covariance / (self._variance + SPREAD), -SLOPE), SLOPE)

    def _keep(self, ratio: float) -> None:
        """Add a ratio to the last WINDOW ratios, and update their statistics."""
        if len(self.last) == WINDOW:
            gone = self.last[0]
            del self.ordered[bisect_left(self.ordered, gone)]
            self.absolute -= abs(1 - 1 / gone)
        self.last.append(ratio)
        insort(self.ordered, ratio)
        self.absolute += abs(1 - 1 / ratio)
        self.p99 = self._p99()

    def _p99(self) -> float:
        """The 99th percentile of the ratios, at least 1 so that predictions get no shorter."""
        return (
            max(1.0, self.ordered[math.ceil(0.99 * len(self.ordered)) - 1]) if self.ordered else 1.0
        )


def _usable(samples: list[tuple[Work, float]]) -> list[tuple[Work, float]]:
    """Drop samples without work or time. Raises `ValueError` if few of either kind remain."""
    samples = [(work, seconds) for work, seconds in samples if work.tokens and seconds > 0]
    for words, prefill in (("of decodes alone", False), ("with prefill", True)):
        if (found := sum(bool(work.prefill) == prefill for work, _ in samples)) < 4:
            raise ValueError(
                f"{found} steps {words} among {len(samples)}: at least 4 are needed to fit step "
                "times"
            )
    return samples


def _ratios(
    fitted: Predictor, samples: list[tuple[Work, float]]
) -> tuple[list[float], list[float]]:
    """Return measured / predicted times of steps that only decode, and of steps with prefill."""
    alone, prefill = (
        [s / fitted.seconds(w) for w, s in samples if bool(w.prefill) == kind]
        for kind in (False, True)
    )
    return _quantiles(alone), _quantiles(prefill)


def _quantiles(ratios: Iterable[float]) -> list[float]:
    """Pick at most SEEDS of the ratios, evenly spaced by rank, with the smallest and largest."""
    ordered = sorted(ratios)
    count = min(len(ordered), SEEDS)
    return [
        round(ordered[round(i * (len(ordered) - 1) / max(1, count - 1))], 6) for i in range(count)
    ]


def _enough_of_both(by_error: list[tuple[Work, float]]) -> list[tuple[Work, float]]:
    """Keep of each kind of step the share KEPT with the smallest errors. If the share were taken of
    all samples, one kind could be left without any."""
    kept = []
    for prefill in (False, True):
        kind = [sample for sample in by_error if bool(sample[0].prefill) == prefill]
        kept += kind[: max(4, math.ceil(KEPT * len(kind)))]
    return kept


def _fit(samples: list[tuple[Work, float]], scale: Sequence[float]) -> list[float]:
    """Fit c0 to c5 by least squares of the samples' errors, each divided by its `scale` in seconds.
    It alternates: decide for each sample whether c0 or the prefill is the maximum, then fit c."""
    import numpy as np

    tokens = np.array([sum(new for new, _ in work.prefill) for work, _ in samples], float)
    attended = np.array(
        [sum(new * (before + new / 2) for new, before in work.prefill) for work, _ in samples],
        float,
    )
    decodes = np.array([work.decodes for work, _ in samples], float)
    context = np.array([work.decode_context for work, _ in samples], float)
    seconds, scale = np.array([s for _, s in samples], float), np.asarray(scale, float)
    floor = tokens == 0  # samples in which c0 is the maximum
    ones, best, best_loss = np.ones(len(samples)), None, math.inf
    for _ in range(ROUNDS):
        # (samples, 6)
        columns = np.stack([floor, tokens * ~floor, attended * ~floor, decodes, context, ones], 1)
        c = _nonnegative(columns / scale[:, None], seconds / scale)
        prefill = c[1] * tokens + c[2] * attended
        predicted = np.maximum(c[0], prefill) + c[3] * decodes + c[4] * context + c[5]
        loss = float((((predicted - seconds) / scale) ** 2).sum())
        if loss < best_loss:
            best, best_loss = c, loss
        new_floor = (tokens == 0) | (c[0] >= prefill)
        if (new_floor == floor).all():
            break
        floor = new_floor
    return [float(x) for x in best]


def _nonnegative(a, b):
    """Return the x >= 0 that minimizes |a x - b|^2, for few columns: a is (n, k), b is (n,), x is
    (k,). Solves without the bound for every set of columns, and takes the best solution >= 0."""
    import numpy as np

    norms = np.linalg.norm(a, axis=0)
    used = [column for column in range(a.shape[1]) if norms[column] > 0]
    gram, right = a.T @ a, a.T @ b
    best, best_value = np.zeros(a.shape[1]), 0.0
    for size in range(1, len(used) + 1):
        for support in itertools.combinations(used, size):
            at = list(support)
            scaled = gram[np.ix_(at, at)] / np.outer(norms[at], norms[at])
            x = np.linalg.lstsq(scaled, right[at] / norms[at], rcond=1e-12)[0] / norms[at]
            # The loss without the constant |b|^2.
            value = float(x @ gram[np.ix_(at, at)] @ x - 2 * x @ right[at])
            if (x >= 0).all() and value < best_value:
                best, best_value = np.zeros(a.shape[1]), value
                best[at] = x
    return best
