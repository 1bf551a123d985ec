"""A placement policy that moves every trajectory as soon as it can, whatever the hosts carry."""

from rose.scheduler.events import Action, MoveTrajectory
from rose.scheduler.state import Cluster


class Restless:
    """To the host that tells its load and does not have it; `most` moves of each trajectory."""

    def __init__(self, most: int) -> None:
        self._most, self._moves = most, {}

    def decide(self, at: float, cluster: Cluster) -> list[Action]:
        moves = []
        for name, one in sorted(cluster.saved.items()):
            others = sorted(host for host in cluster.hosts if host != one.host)
            if others and self._moves.get(name, 0) < self._most:
                self._moves[name] = self._moves.get(name, 0) + 1
                moves.append(MoveTrajectory(name, others[0]))
        return moves
