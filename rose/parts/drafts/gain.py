"""Choose draft lengths by the tokens per second that drafts are expected to gain.

Pure: numbers in, decisions out. In this package, a step is an engine step.

A step with B requests and n drafted tokens takes T = a + b B + c n + d [n > 0] seconds, with all
coefficients >= 0. It is expected to generate B tokens plus the sum of the drafted tokens' chances
of acceptance. We draft the likeliest tokens of the batch, as many as maximize tokens per second.
This is Seer's marginal rule with one budget for the batch, and with measured step times instead of
a table. If drafts don't pay, as with tiny models or text that isn't repeated, nothing is drafted.
Some steps still look drafts up, to notice when they begin to pay.

T is fitted on this engine's own steps in which every request decodes. There is one fit each for 1,
2, 3 to 4, 5 to 8, ... requests, as kernels change with the batch size. Chances are scaled by the
ratio of accepted to expected tokens, because the chance of the best of many guesses is
overestimated. The fit needs steps with and without drafts. So the first steps alternate between
both, and later every `PROBE`-th step does the opposite of the decision.
"""

from __future__ import annotations

import numpy as np

# Least ratio of tokens/s with drafts to tokens/s without. Less is within the fit's error.
MIN_GAIN = 1.05
# Number of last steps of each kind that T is fitted on. Older ones are dropped, because a machine's
# load changes within minutes.
WINDOW = 128
MIN_STEPS = 16  # steps of each kind before the first fit
# A step that took this many times its fitted time is left out of the fit: the engine was paused,
# or had a page fault.
OUTLIER = 3.0
# Steps between two probes. A probe costs a step at most, so probes cost less than 1 %.
PROBE = 128
PROBE_TOKENS = 4  # most tokens drafted for a request in a probe
PROBE_CHANCE = 0.2  # least chance of a token drafted in a probe
# Accepted and expected tokens that `trust` begins with, so that the first drafts move it little.
PRIOR_TOKENS = 20.0
KEPT = 0.98  # factor on earlier accepted and expected tokens at each step with drafts
REFIT = 64  # steps between two fits
LONGEST_SKIP = 8  # most steps in a row without looking up drafts, while drafts don't pay


class StepTimes:
    """Measured and fitted step times for one range of batch sizes; see the module's docstring. A
    step's kind is 0 without drafts and 1 with drafts."""

    def __init__(self) -> None:
        # Ring buffers of (B, n, seconds), one for each kind of step.
        self._steps = [np.zeros((WINDOW, 3)) for _ in range(2)]
        self._counts, self._unfitted = [0, 0], 0
        self.fitted: tuple[float, float, float, float] | None = None  # a, b, c, d

    def observe(self, requests: int, drafted: int, seconds: float) -> None:
        kind = int(drafted > 0)
        self._steps[kind][self._counts[kind] % WINDOW] = requests, drafted, seconds
        self._counts[kind] += 1
        self._unfitted += 1
        if self.fitted is None and min(self._counts) >= MIN_STEPS or self._unfitted >= REFIT:
            self._fit()

    @property
    def missing_kind(self) -> int | None:
        """Kind of steps of which a fit needs more; None if there are enough of both."""
        fewer = int(self._counts[1] < self._counts[0])
        return fewer if self._counts[fewer] < MIN_STEPS else None

    def _fit(self) -> None:
        """Fit T by least squares of its relative errors, then again without outliers."""
        self._unfitted = 0
        if min(self._counts) < MIN_STEPS:
            return
        steps = [ring[:count] for ring, count in zip(self._steps, self._counts, strict=True)]
        requests, drafted, seconds = np.concatenate(steps).T
        columns = np.stack([np.ones_like(requests), requests, drafted, drafted > 0], 1)
        columns /= seconds[:, None]
        found = _nonnegative(columns)
        found = _nonnegative(columns[columns @ found > 1 / OUTLIER])
        self.fitted = tuple(map(float, found))


def _nonnegative(a: np.ndarray) -> np.ndarray:
    """Find x >= 0 with a small |a x - 1|^2; `a` is (n, k), x is (k,). Solves least squares, and
    drops the column with the most negative contribution until no factor is negative."""
    found, kept = np.zeros(a.shape[1]), list(range(a.shape[1]))
    while kept:
        x = np.linalg.lstsq(a[:, kept], np.ones(len(a)), rcond=1e-9)[0]
        if x.min() >= 0:
            found[kept] = x
            break
        del kept[int(np.argmin(x * np.abs(a[:, kept]).mean(0)))]
    return found


def lengths(chances: np.ndarray, fitted: tuple[float, float, float, float]) -> np.ndarray:
    """Return how many tokens to draft for each request, (B,) int; all 0 if drafts don't pay.
    `chances` (B, most) is the chance that a drafted token and all before it are accepted, so it
    falls along each row. `fitted` is (a, b, c, d) of the module's docstring."""
    a, b, c, d = fitted
    requests = len(chances)
    likeliest = np.sort(chances, axis=None)[::-1]
    likeliest = likeliest[: np.count_nonzero(likeliest)]
    undrafted_s = a + b * requests
    if not len(likeliest) or undrafted_s <= 0:
        return np.zeros(requests, int)
    tokens = requests + np.cumsum(likeliest)
    seconds = undrafted_s + d + c * np.arange(1, len(likeliest) + 1)
    best = fastest(tokens, seconds, requests / undrafted_s)
    if best is None:
        return np.zeros(requests, int)
    return np.count_nonzero(chances >= likeliest[best], axis=1)


def fastest(tokens: np.ndarray, seconds: np.ndarray, without: float) -> int | None:
    """Index of the option with the most tokens per second. Option i generates `tokens[i]` in a step
    of `seconds[i]`; both are (n,). Returns None if the best one gains less than `MIN_GAIN` over
    `without` tokens per second."""
    rates = tokens / seconds
    best = int(np.argmax(rates))
    return best if rates[best] >= MIN_GAIN * without else None


class Gate:
    """Decides at each step how many tokens are drafted for each request. If `adaptive` is false,
    all tokens that the lookup finds are drafted."""

    def __init__(self, adaptive: bool) -> None:
        self.adaptive = adaptive
        self._times: dict[int, StepTimes] = {}
        self._step, self._probing = 0, False
        self._skip = 0  # steps to skip between two lookups
        self._skipped = 0  # steps skipped since the last lookup
        self._expected = 0.0  # accepted tokens expected of the last step's drafts
        self._expected_sum = 0.0  # fading sum of `_expected`
        self._accepted_sum = 0.0  # fading sum of accepted tokens

    def looks_up(self) -> bool:
        """Begin a step. Return True if this step should look up drafts."""
        self._step += 1
        self._probing = self._step % PROBE == 0
        if not self.adaptive or self._skipped >= self._skip or self._probing:
            self._skipped = 0
            return True
        self._skipped += 1
        return False

    def decide(self, chances: np.ndarray) -> np.ndarray:
        """Return how many tokens to draft for each request, (B,). `chances`: see `lengths`."""
        possible = np.count_nonzero(chances, axis=1)
        if not self.adaptive:
            return possible
        times = self._times_of(len(chances))
        probe = np.minimum(
            np.count_nonzero(chances >= PROBE_CHANCE, axis=1), 1 + self._step % PROBE_TOKENS
        )
        if (missing := times.missing_kind) is not None:
            found = probe * missing
        else:
            found = lengths(chances * self.trust, times.fitted)
        pays = bool(found.any())
        if self._probing and missing is None:
            found = probe * (not pays)
        else:
            self._skip = 0 if pays else min(LONGEST_SKIP, 2 * self._skip + 1)
        drafted = np.arange(chances.shape[1]) < found[:, None]
        self._expected = float(chances[drafted].sum())
        return found

    @property
    def trust(self) -> float:
        """Factor that corrects chances: accepted over expected tokens, at most 1."""
        accepted = self._accepted_sum + PRIOR_TOKENS
        return min(1.0, accepted / (self._expected_sum + PRIOR_TOKENS))

    def accepted(self, tokens: int) -> None:
        """Count the accepted tokens of the drafts that were decided last."""
        if self._expected:
            self._expected_sum = KEPT * self._expected_sum + self._expected
            self._accepted_sum = KEPT * self._accepted_sum + tokens
            self._expected = 0.0

    def observe(self, requests: int, drafted: int, seconds: float) -> None:
        """Record the duration of a step in which every request decoded."""
        if self.adaptive:
            self._times_of(requests).observe(requests, drafted, seconds)

    def _times_of(self, requests: int) -> StepTimes:
        return self._times.setdefault((requests - 1).bit_length(), StepTimes())
