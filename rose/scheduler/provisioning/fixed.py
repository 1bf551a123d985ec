"""The ranks of the job, and those that join by themselves."""

from __future__ import annotations

from rose.scheduler.events import Action
from rose.scheduler.state import Cluster


class Fixed:
    """Never asks for capacity and never rests any."""

    def decide(self, at: float, cluster: Cluster) -> list[Action]:
        return []
