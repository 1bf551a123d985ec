"""Groups of older versions first."""

from __future__ import annotations

from rose.scheduler.events import Event, GroupFinished, StepBegun
from rose.scheduler.state import Cluster, TurnState


class DueFirst:
    """By the version that was the newest at the group's first turn, then by arrival. Ours, for
    batching policies that carry groups over (`carry_over`, `bounded_staleness`): what the next step
    waits for is not held up by what a later one may take. Nothing starves: only finitely many
    groups are older. With synchronous batching it is `fifo`."""

    def __init__(self) -> None:
        self._versions: dict[str, int] = {}  # group -> version

    def key(self, turn: TurnState, cluster: Cluster) -> int:
        return self._versions.setdefault(turn.group, cluster.version)

    def heard(self, event: Event, cluster: Cluster) -> None:
        match event:
            case GroupFinished(group=group):
                self._versions.pop(group, None)
            case StepBegun():  # those of dropped groups
                alive = set(cluster.group_of.values())
                self._versions = {
                    group: version for group, version in self._versions.items() if group in alive
                }
