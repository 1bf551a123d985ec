"""The supply of simulated workers: initial workers, spot instances, and capacity on request."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from rose.parts.simulator import result, spec
from rose.parts.simulator.loop import Loop
from rose.parts.simulator.workers import Workers
from rose.scheduler import events as ev


class Supply:
    """The rules by which workers join and leave."""

    def __init__(
        self,
        what: spec.Spec,
        loop: Loop,
        draw: np.random.Generator,
        workers: Workers,
        feed: Callable[[ev.Event], None],
        counts: result.Counts,
    ) -> None:
        self._spec, self._loop, self._draw = what, loop, draw
        self._workers, self._feed, self._counts = workers, feed, counts
        self._requests: dict[str, tuple[spec.Pool, bool]] = {}  # request -> (pool, joined)
        # pool -> number of its requests: open, granted or joined
        self._used = {pool.name: 0 for pool in what.pools}
        # pool -> spot instances that start or run
        self._spot: dict[str, list[str]] = {pool.name: [] for pool in what.pools}
        # pool -> number of spot instances started so far
        self._started_spot = dict.fromkeys(self._used, 0)

    def start(self) -> None:
        """Join the initial workers, which hold version 0, and schedule changes of availability."""
        for pool in self._spec.pools:
            if pool.available is not None:
                call = self._reclaim if pool.on_request else self._spot_changed
                for at in pool.available.at.tolist():
                    self._loop.at(at, call, pool)
            elif not pool.on_request:
                for index in range(pool.count):
                    self._workers.join(f"{pool.name}-{index}", pool, 0, -1.0)

    def _spot_changed(self, pool: spec.Pool, _ticket: int) -> None:
        """Lose random instances if fewer are available now, or start instances if more are."""
        here, count = self._spot[pool.name], min(self._available(pool), pool.count)
        while len(here) > count:
            worker = self._workers.by_name.get(here.pop(int(self._draw.integers(len(here)))))
            if worker is not None:
                self._counts.lost_workers += 1
                self._workers.lose(worker, "the spot instance was reclaimed")
        for _ in range(count - len(here)):
            name = f"{pool.name}-{self._started_spot[pool.name]}"
            self._started_spot[pool.name] += 1
            here.append(name)
            first = self._loop.now == 0
            self._loop.at(
                self._loop.now + (0 if first else pool.allocation.start_s),
                self._spot_started,
                (pool, name, 0 if first else -1),
            )

    def _spot_started(self, what: tuple[spec.Pool, str, int], _ticket: int) -> None:
        """Join the spot instance, unless it was lost meanwhile."""
        pool, name, version = what
        if name in self._spot[pool.name]:
            asked_at = self._loop.now - pool.allocation.start_s if version < 0 else -1.0
            self._workers.join(name, pool, version, asked_at)

    def _reclaim(self, pool: spec.Pool, _ticket: int) -> None:
        """Lose random workers of a pool `on_request` while more are in use than available."""
        while self._used[pool.name] > self._available(pool):
            here = [name for name, (of, joined) in self._requests.items() if of is pool and joined]
            if not here:
                return  # `_started` checks again for the workers that still start.
            request = here[int(self._draw.integers(len(here)))]
            self._forget(request)
            self._counts.lost_workers += 1
            self._workers.lose(self._workers.by_name[request], "the spot instance was reclaimed")
            self._feed(ev.CapacityEnded(at=self._loop.now, request=request))

    def _available(self, pool: spec.Pool) -> int:
        """Return how many workers the pool can have now."""
        if pool.available is None:
            return pool.count
        place = int(np.searchsorted(pool.available.at, self._loop.now, side="right")) - 1
        return int(pool.available.workers[place])

    def request(self, action: ev.RequestCapacity) -> None:
        pool = self._pool_of(action.request)
        self._used[pool.name] += 1
        self._requests[action.request] = pool, False
        self._feed(ev.CapacityQueued(at=self._loop.now, request=action.request))
        queued = self._draw.exponential(pool.allocation.queue_s) if pool.allocation.queue_s else 0.0
        self._loop.at(
            self._loop.now + queued, self._answer_request, (action.request, self._loop.now)
        )

    def _pool_of(self, request: str) -> spec.Pool:
        """Return the pool that the request names, or the first pool on request."""
        pools = [pool for pool in self._spec.pools if pool.on_request]
        named = [
            pool for pool in pools if request == pool.name or request.startswith(pool.name + "-")
        ]
        if not pools:
            raise ValueError(
                f"{self._spec.name}: the scheduler asks for {request}, and no pool is on_request; "
                "add one, or choose scheduler/provisioning=fixed"
            )
        return (named or pools)[0]

    def _answer_request(self, what: tuple[str, float], _ticket: int) -> None:
        """Grant the request, or refuse it if the pool is full or by chance."""
        request, asked_at = what
        if request not in self._requests:
            return  # The request was released in the meantime.
        pool, now = self._requests[request][0], self._loop.now
        most = min(self._available(pool), pool.count)
        full = self._used[pool.name] > most
        if full or self._draw.random() < pool.allocation.refused:
            self._forget(request)
            self._counts.refused += 1
            reason = f"{most} workers of {pool.name} are in use" if full else "refused by chance"
            self._feed(ev.CapacityRefused(at=now, request=request, reason=reason))
            return
        self._feed(ev.CapacityGranted(at=now, request=request))
        self._loop.at(now + pool.allocation.start_s, self._started, (request, asked_at))

    def _started(self, what: tuple[str, float], _ticket: int) -> None:
        """Join the requested worker, unless it was released meanwhile."""
        request, asked_at = what
        if request in self._requests:
            pool = self._requests[request][0]
            self._requests[request] = pool, True
            self._workers.join(request, pool, -1, asked_at)
            if pool.available is not None:
                self._reclaim(pool, 0)

    def release(self, action: ev.ReleaseCapacity) -> None:
        if action.request not in self._requests:
            return
        joined = self._requests[action.request][1]
        self._forget(action.request)
        if joined and action.request in self._workers.by_name:
            self._workers.lose(self._workers.by_name[action.request], "released")

    def _forget(self, request: str) -> None:
        self._used[self._requests.pop(request)[0].name] -= 1
