"""The dial between the latency of the online engine S and the throughput of the rollout engine R.
It decides for each step of S whether R may run beside it. Pure.

A step of S beside R takes 1 / (1 - h) times as long; h is the interference measured by
rose.parts.lending.profile. So R runs beside a step only if
1. the step has no prompt, so that no first token waits for R,
2. every request still meets its targets if the step takes that long (hold_until), and
3. earlier decodes of S have saved as much time as the step loses. A decode saves time when it takes
   less than the target of the median time per output token (tpot_p50_s) allows.
"""

from __future__ import annotations

from rose.parts.lending.config import Slo
from rose.parts.lending.rules.predictor import Work

# Share of tpot_p50_s that a token may take in the engine on average. The remainder is for sending
# the token to its client.
PACE = 0.97
# Largest debt of a slow phase (a negative `saved`), in multiples of tpot_p50_s. The requests that
# were slowed have ended by the time such a debt is paid.
MOST_OWED = 50.0
# Largest debt that outlives its requests. Short answers often end before a shared step that took
# longer than expected is paid for. Forgiven each time, it would raise the median above its target.
KEPT_OWED = 5.0
LEAST_LEFT = 0.05  # least value taken for 1 - h; a measured h may be 1


class Dial:
    """Decides beside which steps of S a step of R may run; without targets, beside no step. `hold`
    and `hold_mean` are the profile's h at its P99 and its mean."""

    def __init__(self, slo: Slo | None, hold: float, hold_mean: float) -> None:
        self._slo = slo
        self._factor = 1 / max(LEAST_LEFT, 1 - hold)
        self._factor_mean = 1 / max(LEAST_LEFT, 1 - hold_mean)
        self.saved = 0.0  # seconds by which decodes were faster than the target allows

    def lets(self, work: Work, decode_s: float, left_s: float) -> bool:
        """Return True if the rollout engine R may run beside a step of the online engine S that has
        this work. `decode_s`: predicted seconds of the step without R. `left_s`: seconds for which
        S could compute nothing and still meet all targets (slo.hold_until).

        With R, by the P99 of h, the step must take at most `left_s`. By the mean of h, it must get
        longer by at most the time that decodes have saved.
        """
        if self._slo is None or work.prefill or not decode_s > 0:
            return False
        return (
            decode_s * self._factor <= left_s and decode_s * (self._factor_mean - 1) <= self.saved
        )

    def decoded(self, seconds: float) -> None:
        """Count a step of S with decodes. `seconds` is the mean time since the requests' previous
        tokens. It includes the time between two steps, in which R may have had the device."""
        if self._slo is None:
            return
        target = self._slo.tpot_p50_s
        most = seconds * self._factor_mean
        self.saved = min(most, max(-MOST_OWED * target, self.saved + PACE * target - seconds))

    def idle(self) -> None:
        """Forget the time saved, and most of a debt, because S has no requests."""
        if self._slo is not None:
            self.saved = min(0.0, max(self.saved, -KEPT_OWED * self._slo.tpot_p50_s))
