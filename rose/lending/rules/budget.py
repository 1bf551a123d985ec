"""The rollout engine's part of the device's one KV budget. Pure.

What it is lent grows to share x (1 - reserve) of all, less what the online engine S uses or wants,
or lately did. When both together pass the high watermark it is halved at once, again until they are
under it, and then stays frozen until the next training step (ROSE section 5), so that memory
doesn't go to and fro with each burst. It is 0 when nothing is lent. While a board is silent for
less than revoke_after_s it stays as it is: S uses no more than it was given back.
"""

from __future__ import annotations

import math

from rose.config.serving import Lending
from rose.lending.board import Control, Online
from rose.lending.rules.gate import Reason, lent

LOW = 0.9  # of the high watermark, to which it grows: else the next block of S would cross it
HALF_LIFE_S = 10.0  # of what S has lately used: its bursts come again


class Budget:
    """`total`: bytes of KV memory for both engines."""

    def __init__(self, lending: Lending, total: int) -> None:
        self._lending, self._total = lending, total
        self.bytes = 0
        self.frozen = False
        self._epoch = -1.0
        self._peak = 0.0
        self._now: float | None = None
        self._silent_s = math.inf  # nothing was received yet

    def update(self, now: float, online: Online | None, control: Control | None) -> int:
        """R's budget from now on, bytes. Call it before each of R's steps and while R waits."""
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
        """What may be lent when S needs so much, by the share of this hour and the reserve; may be
        negative."""
        lendable = (1 - self._lending.reserve) * self._total
        return int(min(min(share, 1.0) * lendable, lendable - needed))

    def _shrink(self, needed: float, share: float) -> None:
        above = min(
            int(self._lending.high_watermark * self._total - needed), self._limit(needed, 1.0)
        )
        while self.bytes > max(0, above):
            self.bytes //= 2
            self.frozen = True
        # another hour has begun: no revocation
        self.bytes = min(self.bytes, max(0, self._limit(0.0, share)))
