"""Every idle GPU that a training job can have: the online service's, and its own trainer's."""

from __future__ import annotations

from rose.scheduler.events import Action, Event, GroupFinished, RestWorker, StepBegun, UseWorker
from rose.scheduler.provisioning.rose import Rose
from rose.scheduler.state import Cluster


class AllIdle(Rose):
    """ROSE's cooperative provisioning, and beside it the trainer's GPUs (hybrid workers) from each
    step's begin until its batch is complete. Ours: RLBoost (arXiv 2510.19225) lets the trainer's
    GPUs roll out beside spot machines, ROSE leaves them idle; borrowed ones and they go together,
    and with an asynchronous batching they shorten just the time for which the trainer waits. Only
    while that is long: they roll out if the trainer waited for longer than `hybrid_wait_s` (waking
    up, weights, and going to sleep again) in the last step; in the first one they do. The other
    arguments are those of `rose`.
    """

    def __init__(
        self,
        n_serving: int,
        recent_s: float,
        hysteresis: float,
        activation_s: float,
        idle_s: float,
        hybrid_wait_s: float,
    ) -> None:
        super().__init__(n_serving, recent_s, hysteresis, activation_s, idle_s)
        if not hybrid_wait_s >= 0:
            raise ValueError(f"hybrid_wait_s={hybrid_wait_s} must not be negative")
        self.hybrid_wait_s = hybrid_wait_s
        self._waits_since = 0.0
        self._waited_s = float("inf")

    def joins_resting(self, kind: str) -> bool:
        return kind in ("cooperative", "hybrid")

    def heard(self, event: Event, cluster: Cluster) -> list[Action]:
        actions = super().heard(event, cluster)
        match event:
            case StepBegun(at=at) if not cluster.training:
                waited, self._waits_since = self._waited_s, at
                return actions + (
                    self._hybrid(cluster, UseWorker) if waited > self.hybrid_wait_s else []
                )
            case StepBegun():
                self._waited_s = 0.0
            case GroupFinished(at=at) if cluster.training:
                if self._waits_since >= 0:
                    self._waited_s, self._waits_since = at - self._waits_since, -1.0
                return actions + self._hybrid(cluster, RestWorker)
        return actions

    def _hybrid(self, cluster: Cluster, change: type[UseWorker] | type[RestWorker]) -> list[Action]:
        return [
            change(name)
            for name, worker in sorted(cluster.workers.items())
            if worker.kind == "hybrid" and worker.resting == (change is UseWorker)
        ]
