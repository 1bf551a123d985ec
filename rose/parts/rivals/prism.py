"""Prism (arXiv 2505.04021): uses every cooperative worker all the time."""

from __future__ import annotations

from rose.scheduler.events import Action, UseWorker
from rose.scheduler.state import Cluster


class Static:
    """Static co-location, as with Prism's memory sharing alone (arXiv 2505.04021): every worker is
    used while it is joined, whatever the load of its online server. Prism's sharing of memory,
    but not of compute, is `executor: memory_only` of the simulated serving."""

    def decide(self, at: float, cluster: Cluster) -> list[Action]:
        return [
            UseWorker(name) for name, worker in sorted(cluster.workers.items()) if worker.resting
        ]
