"""The KV budget of the rollout engine R: the KV bytes of a device that the online engine S lends.

Pure. The rules:
1. If nothing is lent, the budget is 0.
2. If a board is silent, the budget stays as it is for revoke_after_s, and then is 0. It can stay,
   because S only uses memory that R has released.
3. If R and S together pass the high watermark, the budget is halved until they are below it. Then
   it is frozen until the next training step (ROSE section 5), so that memory doesn't move with each
   burst of S.
4. Otherwise it grows to share x (1 - reserve) of all KV memory, but leaves room for the memory that
   S uses, wants, or has used recently.
"""

from __future__ import annotations

import math

from rose.parts.lending.board import Control, Online
from rose.parts.lending.config import Lending
from rose.parts.lending.rules.gate import Reason, lent

# Share of the high watermark up to which the budget grows. Without this gap, the next block of S
# would cross the watermark.
LOW = 0.9
HALF_LIFE_S = 10.0  # half-life of the remembered peak of S's use; bursts of requests recur


class Budget:
    """Computes R's budget. `total` is the KV memory of both engines together, in bytes."""

    def __init__(self, lending: Lending, total: int) -> None:
        self._lending, self._total = lending, total
        self.bytes = 0
        self.frozen = False
        self._epoch = -1.0
        self._peak = 0.0
        self._now: float | None = None
        self._silent_s = math.inf  # seconds without a fresh board; infinite before the first

    def update(self, now: float, online: Online | None, control: Control | None) -> int:
        """Return R's budget in bytes from `now` on. Call it before R's steps and while R waits."""
        passed, self._now = max(0.0, now - (now if self._now is None else self._now)), now
        reason = lent(now, online, control, self._lending)
        if reason in (Reason.CONTROL_SILENT, Reason.ONLINE_SILENT):
            self._silent_s += passed
            if self._silent_s > self._lending.revoke_after_s:
                self.bytes = 0
            return self.bytes
        self._silent_s = 0.0
        if control.epoch != self._epoch:
            self._epoch, self.frozen = control.epoch, False
        if reason != Reason.OPEN:
            self.bytes = 0
            return 0
        needed = max(online.kv_used, online.kv_wanted)
        if not 0 <= needed < math.inf:
            needed = self._total
        self._peak = max(needed, self._peak * 0.5 ** (passed / HALF_LIFE_S))
        self._shrink(needed, control.share)
        if not self.frozen:
            low = int(LOW * self._lending.high_watermark * self._total - self._peak)
            self.bytes = max(self.bytes, min(low, self._limit(needed, control.share)))
        return self.bytes

    def _limit(self, needed: float, share: float) -> int:
        """Return how many bytes the reserve and this hour's `share` allow to lend while S needs
        `needed` bytes. May be negative."""
        lendable = (1 - self._lending.reserve) * self._total
        return int(min(min(share, 1.0) * lendable, lendable - needed))

    def _shrink(self, needed: float, share: float) -> None:
        """Apply rule 3, then the limit of this hour's `share`."""
        above = min(
            int(self._lending.high_watermark * self._total - needed), self._limit(needed, 1.0)
        )
        while self.bytes > max(0, above):
            self.bytes //= 2
            self.frozen = True
        # A smaller share at a new hour is no revocation, so it doesn't freeze the budget.
        self.bytes = min(self.bytes, max(0, self._limit(0.0, share)))
