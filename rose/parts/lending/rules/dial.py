"""The dial between the online engine's latency and what is harvested beside it: it decides for each
step of the online engine S whether the rollout engine R may run meanwhile. Pure.

A step of S beside R takes 1 / (1 - h) times as long; h is the interference measured by
rose.parts.lending.profile. So R runs beside a step only if
1. the step has no prompt, so that no first token waits for R,
2. every request still meets its targets if the step takes that long (hold_until), and
3. the decodes of S have saved that time before, compared with the pace that the median target of
   the time per output token allows.
"""

from __future__ import annotations

from rose.parts.lending.config import Slo
from rose.parts.lending.rules.predictor import Work

# Share of tpot_p50_s that a token may take in the mean, as the engine sees it. The rest is for the
# token's way to its client.
PACE = 0.97
# Most seconds that a slow phase counts, in multiples of tpot_p50_s. Requests that suffered from it
# have ended by then.
MOST_OWED = 50.0
LEAST_LEFT = 0.05  # least of 1 - h, as a measured h may be 1


class Dial:
    """Decides beside which steps of S a step of R may run. Without targets, beside none. `hold` and
    `hold_mean` are the profile's h at its P99 and in the mean."""

    def __init__(self, slo: Slo | None, hold: float, hold_mean: float) -> None:
        self._slo = slo
        self._factor = 1 / max(LEAST_LEFT, 1 - hold)
        self._factor_mean = 1 / max(LEAST_LEFT, 1 - hold_mean)
        self.saved = 0.0  # seconds by which decodes were faster than the target allows

    def lets(self, work: Work, decode_s: float, left_s: float) -> bool:
        """Return True if the rollout engine R may run beside a step of the online engine S that has
        this work. `decode_s`: predicted seconds of the step without R. `left_s`: seconds by which
        the step may end later and all requests still meet their targets (slo.hold_until).

        R must make the step neither longer than `left_s`, by its P99, nor in the mean by more than
        decodes have saved.
        """
        if self._slo is None or work.prefill or not decode_s > 0:
            return False
        return (
            decode_s * self._factor <= left_s and decode_s * (self._factor_mean - 1) <= self.saved
        )

    def decoded(self, seconds: float) -> None:
        """Count a step of S with decodes. `seconds` is the mean time since their tokens before,
        which has also the time between two steps: R may have had the device then, too."""
        if self._slo is None:
            return
        target = self._slo.tpot_p50_s
        most = seconds * self._factor_mean
        self.saved = min(most, max(-MOST_OWED * target, self.saved + PACE * target - seconds))

    def idle(self) -> None:
        """Count from zero again: no request is left that has waited."""
        self.saved = 0.0
