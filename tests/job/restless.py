"""Placement policies that move trajectories at every chance, so that no test waits for one."""

from dataclasses import replace

from rose.policies.placement import Rebalance
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


class Relieve(Rebalance):
    """Takes every load as told just now, and decides without patience: on each tick."""

    def __init__(self, most: int) -> None:
        super().__init__(crowded=1.0, margin=1.0, move_s=0.0, patience_s=0.0, at_once=most)

    def decide(self, at: float, cluster: Cluster) -> list[Action]:
        hosts = {name: replace(host, at=at) for name, host in cluster.hosts.items()}
        return super().decide(at, replace(cluster, hosts=hosts))
