"""Preemptible jobs as the queue of turns demands."""

from __future__ import annotations

from rose.scheduler.events import Action, ReleaseCapacity, RequestCapacity
from rose.scheduler.state import Cluster

MAX_BACK_OFF = 64  # times `back_off_s`


class OnDemand:
    """Low-priority jobs, one worker each, as the queue of turns demands.

    From `min` to `max` of them: one more when turns have waited without a break for `patience_s`;
    one less when none has waited for `idle_s` (longer than a training phase, in which none does),
    the last asked for first. At least `cool_down_s` lie between two decisions. After a refusal
    nothing is asked for `back_off_s`, twice that after the next in a row, up to MAX_BACK_OFF times.
    All in seconds.
    """

    def __init__(
        self,
        min: int,
        max: int,
        patience_s: float,
        idle_s: float,
        cool_down_s: float,
        back_off_s: float,
    ) -> None:
        if not 0 <= min <= max or max < 1:
            raise ValueError(f"min={min}, max={max}: 0 <= min <= max, and max at least 1")
        for name, value in (
            ("patience_s", patience_s),
            ("idle_s", idle_s),
            ("cool_down_s", cool_down_s),
            ("back_off_s", back_off_s),
        ):
            if not value >= 0:
                raise ValueError(f"{name}={value}: must not be negative")
        self.min, self.max, self.patience_s, self.idle_s = min, max, patience_s, idle_s
        self.cool_down_s, self.back_off_s = cool_down_s, back_off_s
        self._waiting_since: float | None = None
        self._idle_since: float | None = None
        self._decided_at = float("-inf")
        self._asked = 0

    def decide(self, at: float, cluster: Cluster) -> list[Action]:
        self._look(at, cluster.waiting > 0)
        have = len(cluster.requests)
        if have >= self.min and at - self._decided_at < self.cool_down_s:
            return []
        if self._wants_more(at, have) and not self._backs_off(at, cluster):
            self._decided_at = at
            return [RequestCapacity(self._new_name(cluster))]
        if (
            have > self.min
            and self._idle_since is not None
            and at - self._idle_since >= self.idle_s
        ):
            self._decided_at = at
            return [ReleaseCapacity(list(cluster.requests)[-1])]
        return []

    def _look(self, at: float, waiting: bool) -> None:
        if waiting:
            self._idle_since = None
            self._waiting_since = at if self._waiting_since is None else self._waiting_since
        else:
            self._waiting_since = None
            self._idle_since = at if self._idle_since is None else self._idle_since

    def _new_name(self, cluster: Cluster) -> str:
        self._asked += 1
        while (name := f"lend-{self._asked}") in cluster.requests:  # an earlier attempt's
            self._asked += 1
        return name

    def _wants_more(self, at: float, have: int) -> bool:
        waited = self._waiting_since is not None and at - self._waiting_since >= self.patience_s
        return have < self.min or have < self.max and waited

    def _backs_off(self, at: float, cluster: Cluster) -> bool:
        if not cluster.refusals:
            return False
        return at - cluster.refused_at < self.back_off_s * min(
            2 ** (cluster.refusals - 1), MAX_BACK_OFF
        )
