"""Applies events and actions about workers to the cluster's state."""

from __future__ import annotations

from collections.abc import Callable

from rose.scheduler import events as ev
from rose.scheduler.dispatch import Dispatch
from rose.scheduler.events import Action
from rose.scheduler.fleet import Fleet
from rose.scheduler.state import Cluster, WorkerState


class Workers:
    """Changes of workers. `joins_resting` says whether a kind of worker rests when it joins."""

    def __init__(
        self, cluster: Cluster, fleet: Fleet, queue: Dispatch, joins_resting: Callable[[str], bool]
    ) -> None:
        self._cluster, self._fleet, self._queue = cluster, fleet, queue
        self._joins_resting = joins_resting

    def joined(self, e: ev.WorkerJoined) -> list[Action]:
        self.forget(e.worker)
        worker = WorkerState(
            e.worker, e.kind, e.max_sequences, e.kv_tokens, e.version, e.hardware, e.shape
        )
        worker.whole_kv_tokens, worker.resting = e.kv_tokens, self._joins_resting(e.kind)
        self._cluster.workers[e.worker] = worker
        self._fleet.changed(e.worker)
        return self._load_if_stale(worker)

    def draining(self, e: ev.WorkerDraining) -> list[Action]:
        if e.worker in self._cluster.workers:
            self._cluster.workers[e.worker].draining = True
            self._fleet.changed(e.worker)
        return []

    def capacity_changed(self, e: ev.WorkerCapacity) -> list[Action]:
        worker = self._cluster.workers.get(e.worker)
        if worker is not None:
            worker.kv_tokens, worker.max_sequences = e.kv_tokens, e.max_sequences
            worker.expected_s, worker.revoked = e.expected_s, e.revoked
            worker.awaits_capacity_report = False
            self._fleet.changed(e.worker)
        return []

    def loaded(self, e: ev.WorkerLoaded) -> list[Action]:
        worker = self._cluster.workers.get(e.worker)
        if worker is None:
            return []
        worker.version, worker.loading = e.version, False
        self._fleet.changed(e.worker)
        return self._load_if_stale(worker)

    def load_published(self) -> list[Action]:
        """Order the workers in use to load the newest version, except those that are draining; a
        worker that is loading gets the order after that. Forget all cached prefixes, which are
        useless under new weights."""
        self._cluster.home.clear()
        self._cluster.group_home.clear()
        actions: list[Action] = []
        for name, worker in sorted(self._cluster.workers.items()):
            worker.cached.clear()
            self._fleet.changed(name)
            actions += self._load_if_stale(worker)
        return actions

    def use(self, name: str) -> list[Action]:
        """Let a resting worker take turns again."""
        worker = self._cluster.workers.get(name)
        if worker is None or not worker.resting:
            return []
        worker.resting = False
        self._fleet.changed(name)
        return self._load_if_stale(worker)

    def rest(self, name: str) -> list[Action]:
        """Stop using the worker. Its turns are aborted and queued again."""
        worker = self._cluster.workers.get(name)
        if worker is None or worker.resting:
            return []
        worker.resting = True
        turns = [self._cluster.turns[turn] for turn in worker.turns]
        aborts = [ev.AbortTurn(turn.turn, name, turn.attempt, "rest") for turn in turns]
        for turn in turns:
            self._queue.requeue(turn)
        self._empty_cache(worker)
        return aborts

    def forget(self, name: str) -> None:
        """Remove the worker, queue its turns again at their old places, and forget its caches."""
        worker = self._cluster.workers.get(name)
        if worker is None:
            return
        for turn in list(worker.turns):
            self._queue.requeue(self._cluster.turns[turn])
        self._empty_cache(worker)
        del self._cluster.workers[name]

    def _load_if_stale(self, worker: WorkerState) -> list[Action]:
        stale = 0 <= self._cluster.version != worker.version
        if not stale or worker.loading or worker.draining or worker.resting:
            return []
        worker.loading = True
        self._fleet.changed(worker.worker)
        return [ev.LoadWeights(worker.worker, self._cluster.version)]

    def _empty_cache(self, worker: WorkerState) -> None:
        """Forget which prefixes and prompts the worker has cached."""
        for homes in (self._cluster.home, self._cluster.group_home):
            for key in worker.cached:
                if homes.get(key) == worker.worker:
                    del homes[key]
        worker.cached.clear()
        self._fleet.changed(worker.worker)
