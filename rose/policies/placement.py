"""Which environment host carries a trajectory on. Ours: the papers on rollouts leave sandboxes
where they began.

A host slows its commands down by s = max(1, cpu / cores) when `cpu` of its tasks could run. A
trajectory that has spent C seconds in commands is taken to spend as many again (Lindy's rule: no
length is known), so that a move from s to s' saves it C (1 - s' / s). That must be CHARGE times
what the move costs.
"""

from __future__ import annotations

from rose.scheduler.events import Action, MoveTrajectory
from rose.scheduler.state import Cluster, HostState

# Ours: what a move is worth must be twice its price, as half of the trajectories end sooner than
# Lindy's rule says.
CHARGE = 2.0
# Ours: share of a host's memory above which nothing is moved to it.
FULL = 0.9


class Stay:
    """A trajectory stays on the host that began it."""

    def decide(self, at: float, cluster: Cluster) -> list[Action]:
        return []


class Rebalance:
    """Trajectories with a snapshot go from a host whose load (cpu / cores) has been `crowded` for
    `patience_s` to the host that slows them down least, those first that have spent most in
    commands; `at_once` of a host, then it must be crowded for `patience_s` again. A host that has
    told no load for so long takes no part.

    Three things keep it from flapping. The host that is left must be `margin` times as slow as the
    other even after the move, so that none turns a difference round; a host is left, or moved to,
    once in `patience_s`; and of a trajectory that was moved only the commands since then count,
    so that each move has to pay for itself.
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
        self._since: dict[str, float] = {}  # host -> since when it is crowded
        self._moved_at: dict[str, float] = {}  # host -> when it was last left or moved to
        self._counted: dict[str, float] = {}  # moved trajectory -> its commands_s then

    def decide(self, at: float, cluster: Cluster) -> list[Action]:
        known = {h.host: h for h in cluster.hosts.values() if at - h.at <= self._patience_s}
        crowded = [name for name, host in known.items() if _load(host) >= self._crowded]
        self._since = {name: self._since.get(name, at) for name in crowded}
        ready = [name for name in crowded if at - self._since[name] >= self._patience_s]
        ready = sorted(
            filter(lambda name: self._rested(name, at), ready),
            key=lambda name: (-_load(known[name]), name),
        )
        return [move for name in ready for move in self._relieve(known[name], known, at, cluster)]

    def _rested(self, host: str, at: float) -> bool:
        """Its load has been told since it was last left or moved to."""
        return at - self._moved_at.get(host, float("-inf")) > self._patience_s

    def _relieve(
        self, source: HostState, known: dict[str, HostState], at: float, cluster: Cluster
    ) -> list[Action]:
        """Moves from one host. Each takes a trajectory's mean demand along."""
        demand, left = source.cpu / max(1, source.running), source.cpu
        others = [
            host
            for host in known.values()
            if host is not source and host.memory < FULL and self._rested(host.host, at)
        ]
        added = {host.host: host.cpu for host in others}
        moves: list[Action] = []
        for spent, trajectory in self._candidates(source.host, cluster)[: self._at_once]:
            left -= demand
            slow = max(1.0, left / source.cores)
            best = min(others, key=lambda h: (_with(h, added, demand), h.host), default=None)
            if best is None:
                break
            then = _with(best, added, demand)
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
        """(seconds in commands that count, trajectory) of those that it runs, most first."""
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


def _with(host: HostState, cpu: dict[str, float], demand: float) -> float:
    """How much slower its commands are with one trajectory more."""
    return max(1.0, (cpu[host.host] + demand) / host.cores)
