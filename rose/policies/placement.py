"""Which environment host continues a trajectory. Ours: papers on rollouts leave sandboxes where
they started.

A host with `cpu` runnable tasks slows its commands down by s = max(1, cpu / cores). A trajectory
that has spent C seconds in commands is assumed to spend as many again (Lindy's rule, as its length
is unknown). So a move from s to s' saves C (1 - s' / s). This must be at least CHARGE times its
cost.
"""

from __future__ import annotations

from rose.scheduler.events import Action, MoveTrajectory
from rose.scheduler.state import Cluster, HostState

# A move must save this multiple of its cost. Ours: 2, because half of the trajectories end sooner
# than Lindy's rule says.
CHARGE = 2.0
# Nothing moves to a host with at least this share of its memory in use. Ours.
FULL = 0.9


class Stay:
    """Leave each trajectory on the host that started it."""

    def decide(self, at: float, cluster: Cluster) -> list[Action]:
        return []


class Rebalance:
    """Move trajectories with a snapshot from a crowded host to the one that slows them down least.

    A host is crowded once its load (cpu / cores) has been at least `crowded` for `patience_s`. The
    trajectories that have spent most in commands move first, `at_once` of them at most. A host that
    hasn't reported its load for `patience_s` is neither source nor target.

    Three rules prevent flapping:
    1. Even after the move, the source must be at least `margin` times as slow as the target.
    2. Trajectories leave a host, or move to it, only once in `patience_s`.
    3. For a trajectory that was moved, only the commands since then count, so that each move has to
       pay for itself.
    """

    def __init__(
        self, crowded: float, margin: float, move_s: float, patience_s: float, at_once: int
    ) -> None:
        if crowded < 1 or margin < 1:
            raise ValueError(f"crowded={crowded:g}, margin={margin:g}: ratios, 1 or more")
        if move_s < 0 or patience_s < 0 or at_once < 1:
            raise ValueError(
                f"move_s={move_s:g}, patience_s={patience_s:g}, at_once={at_once}: seconds, 0 or "
                "more, and one move or more"
            )
        self._crowded, self._margin, self._move_s = crowded, margin, move_s
        self._patience_s, self._at_once = patience_s, at_once
        self._since: dict[str, float] = {}  # host -> time since which its load is crowded
        self._moved_at: dict[str, float] = {}  # host -> time of the last move from or to it
        self._counted: dict[str, float] = {}  # moved trajectory -> its commands_s at the move

    def decide(self, at: float, cluster: Cluster) -> list[Action]:
        known = {h.host: h for h in cluster.hosts.values() if at - h.at <= self._patience_s}
        crowded = [name for name, host in known.items() if _load(host) >= self._crowded]
        self._since = {name: self._since.get(name, at) for name in crowded}
        ready = [name for name in crowded if at - self._since[name] >= self._patience_s]
        ready = [name for name in ready if self._load_is_settled(name, at)]
        ready.sort(key=lambda name: (-_load(known[name]), name))
        return [move for name in ready for move in self._relieve(known[name], known, at, cluster)]

    def _load_is_settled(self, host: str, at: float) -> bool:
        """True if the load report of a known host is newer than the last move from or to it."""
        return at - self._moved_at.get(host, float("-inf")) > self._patience_s

    def _relieve(
        self, source: HostState, known: dict[str, HostState], at: float, cluster: Cluster
    ) -> list[Action]:
        """Return the moves from a crowded host. Each moved trajectory is assumed to have the mean
        demand of the host's trajectories."""
        demand, left = source.cpu / max(1, source.running), source.cpu
        others = [
            host
            for host in known.values()
            if host is not source and host.memory < FULL and self._load_is_settled(host.host, at)
        ]
        added = {host.host: host.cpu for host in others}
        moves: list[Action] = []
        for spent, trajectory in self._candidates(source.host, cluster)[: self._at_once]:
            left -= demand
            slow = max(1.0, left / source.cores)
            best = min(
                others, key=lambda h: (_slowdown_with(h, added, demand), h.host), default=None
            )
            if best is None:
                break
            then = _slowdown_with(best, added, demand)
            saved_s = spent * (1 - then / max(1.0, source.cpu / source.cores))
            if slow < self._margin * then or saved_s < CHARGE * self._move_s:
                break
            added[best.host] += demand
            self._counted[trajectory] = cluster.saved[trajectory].commands_s
            moves.append(MoveTrajectory(trajectory, best.host))
        for host in {source.host, *(move.host for move in moves)} if moves else ():
            self._moved_at[host] = at
        return moves

    def _candidates(self, host: str, cluster: Cluster) -> list[tuple[float, str]]:
        """Return (seconds in commands since its last move, name) of the host's trajectories, in
        descending order."""
        saved = cluster.saved
        self._counted = {name: s for name, s in self._counted.items() if name in saved}
        found = [
            (one.commands_s - self._counted.get(name, 0.0), name)
            for name, one in saved.items()
            if one.host == host
        ]
        return sorted(found, key=lambda each: (-each[0], each[1]))


def _load(host: HostState) -> float:
    return host.cpu / host.cores


def _slowdown_with(host: HostState, cpu: dict[str, float], demand: float) -> float:
    """Return the host's slowdown with one more trajectory of this demand."""
    return max(1.0, (cpu[host.host] + demand) / host.cores)
