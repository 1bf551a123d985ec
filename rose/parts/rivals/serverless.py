"""Serverless capacity like that of λRL: workers are requested and released like functions."""

from __future__ import annotations

import math

from rose.scheduler.events import Action, ReleaseCapacity, RequestCapacity
from rose.scheduler.state import Cluster


class Serverless:
    """Request workers as turns arrive and release them as turns end (λRL-like: the serverless
    baseline of ROSE's evaluation, and MinionsRL before it).

    It requests, without delay, as many workers as the unfinished turns need at `turns_per_worker`
    each, up to `max`. Workers that weren't needed for `keep_alive_s` are released, the last
    requested first. So every step pays for allocation again: queue, start, and a whole copy of the
    weights. After a refusal it requests nothing for `back_off_s`. Each further refusal doubles this
    time, up to five minutes. If several open requests are refused together, that counts as one
    refusal. Times are in seconds; the values in `conf` are ours.
    """

    asks_for_jobs = True

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
        # Index n: last time at which at least n workers were needed
        self._needed_at = [-math.inf] * (max + 1)
        self._requested = 0

    def decide(self, at: float, cluster: Cluster) -> list[Action]:
        need = min(self.max, math.ceil(len(cluster.turns) / self.turns_per_worker))
        self._needed_at[: need + 1] = [at] * (need + 1)
        have = len(cluster.requests)
        if need > have:
            return (
                []
                if cluster.back_off.waits(at, self.back_off_s)
                else self._request_workers(need - have, cluster)
            )
        keep = next(
            (n for n in range(self.max, need, -1) if at - self._needed_at[n] < self.keep_alive_s),
            need,
        )
        return [ReleaseCapacity(name) for name in reversed(list(cluster.requests)[keep:])]

    def _request_workers(self, count: int, cluster: Cluster) -> list[Action]:
        names: list[str] = []
        while len(names) < count:
            self._requested += 1
            # A request of an earlier attempt of the run may have the name.
            if (name := f"lend-{self._requested}") not in cluster.requests:
                names.append(name)
        return [RequestCapacity(name) for name in names]
