"""ROSE's cooperative provisioning."""

from __future__ import annotations

import math

from rose.scheduler.events import (
    Action,
    Event,
    GroupFinished,
    RestWorker,
    StepBegun,
    UseWorker,
    WorkerCapacity,
    WorkerJoined,
    WorkerLost,
)
from rose.scheduler.state import Cluster, WorkerState


class Rose:
    """At most `n_serving` cooperative workers are used at a time, those first whose online server
    has held the least KV of late (ROSE, arXiv 2605.06534, cooperative provisioning).

    KV use is 1 - kv_tokens / whole_kv_tokens, averaged with weights that fall by 1/e each
    `recent_s`. When training begins, it chooses anew for the next step: activation is over, and the
    new version there, when that begins; one that is used gives way only to one whose use is lower
    by more than `hysteresis`. Within a step a worker is added (one joined, or one was lost) only if
    that pays: activation takes `activation_s` (weights, KV pages), and one more worker beside n
    saves at most 1/(n + 1) of what is left of the step, which is guessed from the steps before
    (exponential mean). One without a turn for `idle_s` is given back when fewer turns are left than
    workers: the tail needs no more of them. A serving GPU lends itself to one training job at a
    time: its executor joins one coordinator, so that what has joined here is lent to no other job.
    The paper names cap, ranking and the one job per GPU; the numbers of `conf` are ours.
    """

    def __init__(
        self, n_serving: int, recent_s: float, hysteresis: float, activation_s: float, idle_s: float
    ) -> None:
        if n_serving < 0:
            raise ValueError(f"n_serving={n_serving} must not be negative")
        for name, value in (
            ("recent_s", recent_s),
            ("hysteresis", hysteresis),
            ("activation_s", activation_s),
            ("idle_s", idle_s),
        ):
            if not value >= 0:
                raise ValueError(f"{name}={value} must not be negative")
        self.n_serving, self.recent_s, self.hysteresis = n_serving, recent_s, hysteresis
        self.activation_s, self.idle_s = activation_s, idle_s
        self._use: dict[str, RecentMean] = {}
        self._busy_at: dict[str, float] = {}
        self._chosen = False  # for the step that comes
        self._begun: float | None = None
        self._step_s = math.inf  # mean; nothing is known in the first step

    def joins_resting(self, kind: str) -> bool:
        return kind == "cooperative"

    def heard(self, event: Event, cluster: Cluster) -> list[Action]:
        match event:
            case WorkerJoined(at=at, worker=name, kind="cooperative"):
                self._use[name] = RecentMean(at, 0.0)
            case WorkerLost(worker=name):
                self._use.pop(name, None)
                self._busy_at.pop(name, None)
            case WorkerCapacity(at=at, worker=name) if name in self._use:
                self._use[name].put(at, kv_use(cluster.workers[name]), self.recent_s)
            case GroupFinished(at=at) if cluster.training and not self._chosen:
                self._chosen = True
                return self._choose(at, cluster)
            case StepBegun(at=at):
                self._learn(at)
                chosen, self._chosen = self._chosen, False
                return [] if chosen else self._choose(at, cluster)
        return []

    def decide(self, at: float, cluster: Cluster) -> list[Action]:
        used = [w for w in self._lent(cluster) if not w.resting]
        for worker in used:
            if worker.turns:
                self._busy_at[worker.worker] = at
        if self._begun is None or cluster.training:
            return []
        if len(cluster.turns) < len(cluster.workers):
            return [
                RestWorker(w.worker)
                for w in used
                if at - self._busy_at.get(w.worker, at) >= self.idle_s
            ]
        left = max(self._step_s - (at - self._begun), 0.0)
        others = sorted(
            (w for w in self._lent(cluster) if w.resting), key=lambda w: self._rank(at, w)
        )
        n = len(cluster.workers) - len(others)
        pays = (
            i for i in range(self.n_serving - len(used)) if left / (n + i + 1) > self.activation_s
        )
        return [self._activate(at, worker) for worker, _ in zip(others, pays, strict=False)]

    def _choose(self, at: float, cluster: Cluster) -> list[Action]:
        ranked = sorted(self._lent(cluster), key=lambda w: self._rank(at, w))
        return [
            *(RestWorker(w.worker) for w in ranked[self.n_serving :] if not w.resting),
            *(self._activate(at, w) for w in ranked[: self.n_serving] if w.resting),
        ]

    def _activate(self, at: float, worker: WorkerState) -> Action:
        self._busy_at[worker.worker] = at
        return UseWorker(worker.worker)

    def _rank(self, at: float, worker: WorkerState) -> tuple[float, str]:
        use = self._use[worker.worker].at(at, self.recent_s)
        return use - (0.0 if worker.resting else self.hysteresis), worker.worker

    def _lent(self, cluster: Cluster) -> list[WorkerState]:
        return [cluster.workers[name] for name in self._use if name in cluster.workers]

    def _learn(self, at: float) -> None:
        if self._begun is not None:
            took = at - self._begun
            self._step_s = took if math.isinf(self._step_s) else (self._step_s + took) / 2
        self._begun = at


def kv_use(worker: WorkerState) -> float:
    """Share of its KV memory that a cooperative worker is not lent: the online server's use, and
    what it reserves."""
    return 1 - worker.kv_tokens / worker.whole_kv_tokens if worker.whole_kv_tokens else 1.0


class RecentMean:
    """Exponential mean over time of a value that holds until the next one is put."""

    def __init__(self, at: float, value: float) -> None:
        self._since, self._at, self._value, self._mean = at, at, value, value

    def at(self, at: float, recent_s: float) -> float:
        weight = math.exp(-(at - self._at) / recent_s) if recent_s else 0.0
        return self._value + (self._mean - self._value) * weight

    def put(self, at: float, value: float, recent_s: float) -> None:
        self._mean = self.at(at, recent_s) if at > self._since else value
        self._at, self._value = at, value
