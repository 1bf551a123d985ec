"""Which capacity, when."""

from __future__ import annotations

from rose.scheduler.events import Action
from rose.scheduler.state import Cluster


class Fixed:
    """The ranks of the job and no others."""

    def decide(self, at: float, cluster: Cluster) -> list[Action]:
        return []
