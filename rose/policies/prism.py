"""Prism: every cooperative worker, always."""

from __future__ import annotations

from rose.scheduler.events import Action, UseWorker
from rose.scheduler.state import Cluster


class Static:
    """Static co-location, as with Prism's memory sharing alone (arXiv 2505.04021): every worker
    that has joined is used from its first second to its last, whatever the load of the online
    server beside it. What Prism shares (memory, not compute) is the serving executor's side:
    `executor: memory_only` of the simulated serving."""

    def decide(self, at: float, cluster: Cluster) -> list[Action]:
        return [
            UseWorker(name) for name, worker in sorted(cluster.workers.items()) if worker.resting
        ]
