"""How long drafts are, from what they are expected to gain. Pure: numbers in, decisions out.

A step with B requests and n drafted tokens takes T = a + b B + c n + d [n > 0] seconds, all >= 0,
and makes B plus the drafts' chances of tokens. Of all that could be drafted the likeliest tokens
are, as far as tokens per second rise; this is Seer's marginal rule with one budget for the batch,
and the step's time measured instead of looked up. Where drafts don't pay, as with tiny models or
text that nobody repeats, none is made, and it is looked only now and then whether that changed.

T is fitted on this engine's own steps of decodes alone, apart for 1, 2, 3 to 4, 5 to 8, ...
requests, as kernels change with the batch. Chances are scaled by how many tokens were accepted of
those hoped for: the best of many guesses is worth less than it looks. The fit needs steps with and
without drafts: the first ones are both by turns, later every `PROBE`-th does the contrary of what
was decided.
"""

from __future__ import annotations

import numpy as np

LEAST_GAIN = 1.05  # tokens/s with drafts over those without: less is within the fit's error
WINDOW = 128  # steps of each kind that T is fitted on: the load of a machine changes in minutes
FEW = 16  # steps of each kind before the first fit
OUTLIER = 3.0  # times what was fitted: an engine that was paused, a page fault
PROBE = 128  # a probe costs at most as much as a step: below 1 %
PROBED, LIKELY = 4, 0.2  # tokens drafted for a request in a probe, at most, and their chance
SURE = 20.0  # accepted tokens, hoped for and got, that stand for what is not known yet
FORGET = 0.98  # of what was hoped for and got, kept from a step with drafts to the next
REFIT = 64  # steps
LONGEST_SKIP = 8  # steps without a look at what could be drafted, while nothing pays


class StepTimes:
    """What steps took: see the module's docstring."""

    def __init__(self) -> None:
        # of steps without and with drafts: (B, n, seconds), in rings
        self._steps = [np.zeros((WINDOW, 3)) for _ in range(2)]
        self._counts, self._unfitted = [0, 0], 0
        self.fitted: tuple[float, float, float, float] | None = None  # a, b, c, d

    def observe(self, requests: int, drafted: int, seconds: float) -> None:
        kind = int(drafted > 0)
        self._steps[kind][self._counts[kind] % WINDOW] = requests, drafted, seconds
        self._counts[kind] += 1
        self._unfitted += 1
        if self.fitted is None and min(self._counts) >= FEW or self._unfitted >= REFIT:
            self._fit()

    @property
    def lacks(self) -> int | None:
        """The kind of steps (0: without drafts, 1: with) of which more are needed for a fit."""
        fewer = int(self._counts[1] < self._counts[0])
        return fewer if self._counts[fewer] < FEW else None

    def _fit(self) -> None:
        self._unfitted = 0
        if min(self._counts) < FEW:
            return
        steps = [ring[:count] for ring, count in zip(self._steps, self._counts, strict=True)]
        requests, drafted, seconds = np.concatenate(steps).T
        columns = np.stack([np.ones_like(requests), requests, drafted, drafted > 0], 1)
        columns /= seconds[:, None]
        found = _nonnegative(columns)
        found = _nonnegative(columns[columns @ found > 1 / OUTLIER])
        self.fitted = tuple(map(float, found))


def _nonnegative(a: np.ndarray) -> np.ndarray:
    """x >= 0 with small |a x - 1|^2, (n, k) -> (k,): least squares, leaving out the column with the
    most negative factor until there is none."""
    found, kept = np.zeros(a.shape[1]), list(range(a.shape[1]))
    while kept:
        x = np.linalg.lstsq(a[:, kept], np.ones(len(a)), rcond=1e-9)[0]
        if x.min() >= 0:
            found[kept] = x
            break
        del kept[int(np.argmin(x * np.abs(a[:, kept]).mean(0)))]
    return found


def lengths(chances: np.ndarray, fitted: tuple[float, float, float, float]) -> np.ndarray:
    """`chances` (B, most), falling along each row: that a drafted token and all before it are
    accepted. How many to draft for each request, (B,) int, all 0 where it doesn't pay."""
    a, b, c, d = fitted
    requests = len(chances)
    order = np.sort(chances, axis=None)[::-1]
    order = order[: np.count_nonzero(order)]
    alone = a + b * requests
    if not len(order) or alone <= 0:
        return np.zeros(requests, int)
    tokens = requests + np.cumsum(order)
    seconds = alone + d + c * np.arange(1, len(order) + 1)
    best = fastest(tokens, seconds, requests / alone)
    if best is None:
        return np.zeros(requests, int)
    return np.count_nonzero(chances >= order[best], axis=1)


def fastest(tokens: np.ndarray, seconds: np.ndarray, without: float) -> int | None:
    """Of ways to draft that make `tokens` in steps of `seconds`, both (n,), the one with the most
    tokens per second; None if that is not worth it beside `without` tokens per second."""
    rates = tokens / seconds
    best = int(np.argmax(rates))
    return best if rates[best] >= LEAST_GAIN * without else None


class Gate:
    """Decides at each step what is drafted; `adaptive` false: all that there is."""

    def __init__(self, adaptive: bool) -> None:
        self.adaptive = adaptive
        self._times: dict[int, StepTimes] = {}
        self._step = self._skip = self._skipped = 0
        self._expected = self._hoped = self._got = 0.0  # of the last step; sums that fade

    def looks(self) -> bool:
        """Whether this step looks up drafts at all."""
        self._step += 1
        if not self.adaptive or self._skipped >= self._skip or self._probes:
            self._skipped = 0
            return True
        self._skipped += 1
        return False

    def decide(self, chances: np.ndarray) -> np.ndarray:
        """(B, most) -> (B,): see `lengths`."""
        possible = np.count_nonzero(chances, axis=1)
        if not self.adaptive:
            return possible
        times = self._times_of(len(chances))
        probe = np.minimum(np.count_nonzero(chances >= LIKELY, axis=1), 1 + self._step % PROBED)
        if (lacks := times.lacks) is not None:
            found = probe * lacks
        else:
            found = lengths(chances * self.trust, times.fitted)
        pays = bool(found.any())
        if self._probes and lacks is None:
            found = probe * (not pays)
        else:
            self._skip = 0 if pays else min(LONGEST_SKIP, 2 * self._skip + 1)
        drafted = np.arange(chances.shape[1]) < found[:, None]
        self._expected = float(chances[drafted].sum())
        return found

    @property
    def trust(self) -> float:
        """Accepted tokens over those hoped for, at most 1."""
        return min(1.0, (self._got + SURE) / (self._hoped + SURE))

    def accepted(self, tokens: int) -> None:
        """So many of the last decision's were."""
        if self._expected:
            self._hoped = FORGET * self._hoped + self._expected
            self._got = FORGET * self._got + tokens
            self._expected = 0.0

    def observe(self, requests: int, drafted: int, seconds: float) -> None:
        """What a step of decodes alone took."""
        if self.adaptive:
            self._times_of(requests).observe(requests, drafted, seconds)

    def _times_of(self, requests: int) -> StepTimes:
        return self._times.setdefault((requests - 1).bit_length(), StepTimes())

    @property
    def _probes(self) -> bool:
        return self._step % PROBE == 0
