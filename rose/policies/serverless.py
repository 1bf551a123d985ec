"""Serverless capacity, as in λRL."""

from __future__ import annotations

import math

from rose.scheduler.events import Action, ReleaseCapacity, RequestCapacity
from rose.scheduler.state import Cluster


class Serverless:
    """Workers are asked for as turns come and given back as they go, like functions (λRL-like: the
    serverless baseline of ROSE's evaluation, and MinionsRL before it).

    As many as the unfinished turns need at `turns_per_worker` each, up to `max`, all at once; what
    is not needed any more for `keep_alive_s` ends, the last asked for first. Every step so pays for
    allocation anew: queue, start and a whole copy of the weights. After a refusal nothing is asked
    for `back_off_s`, twice that after the next in a row, up to five minutes; refusals of what was
    asked for at once count as one. All in seconds;
    the numbers of `conf` are ours.
    """

    def __init__(
        self, max: int, turns_per_worker: int, keep_alive_s: float, back_off_s: float
    ) -> None:
        if max < 0 or turns_per_worker < 1:
            raise ValueError(f"max={max}, turns_per_worker={turns_per_worker}: at least 0 and 1")
        if not (keep_alive_s >= 0 and back_off_s >= 0):
            raise ValueError(
                f"keep_alive_s={keep_alive_s}, back_off_s={back_off_s}: must not be negative"
            )
        self.max, self.turns_per_worker = max, turns_per_worker
        self.keep_alive_s, self.back_off_s = keep_alive_s, back_off_s
        self._needed_at = [-math.inf] * (max + 1)  # the last time at which so many were needed
        self._asked = 0

    def decide(self, at: float, cluster: Cluster) -> list[Action]:
        need = min(self.max, math.ceil(len(cluster.turns) / self.turns_per_worker))
        self._needed_at[: need + 1] = [at] * (need + 1)
        have = len(cluster.requests)
        if need > have:
            return (
                []
                if cluster.back_off.waits(at, self.back_off_s)
                else self._ask(need - have, cluster)
            )
        keep = next(
            (n for n in range(self.max, need, -1) if at - self._needed_at[n] < self.keep_alive_s),
            need,
        )
        return [ReleaseCapacity(name) for name in reversed(list(cluster.requests)[keep:])]

    def _ask(self, count: int, cluster: Cluster) -> list[Action]:
        names: list[str] = []
        while len(names) < count:
            self._asked += 1
            if (name := f"lend-{self._asked}") not in cluster.requests:  # an earlier attempt's
                names.append(name)
        return [RequestCapacity(name) for name in names]
