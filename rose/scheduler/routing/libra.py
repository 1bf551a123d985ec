"""Libra's length buckets."""

from __future__ import annotations

from rose.scheduler.causal_tree import Levels
from rose.scheduler.events import Event, WorkerJoined, WorkerLost
from rose.scheduler.fleet import Fleet
from rose.scheduler.state import Cluster, TurnState, WorkerState

PROBES = 16  # workers of a bucket looked at for one turn: the best of 16 is close to the least loaded, at O(1)


class Libra:
    """Workers form buckets for short to long trajectories; tool outcomes, not length predictions, move a trajectory
    between them (Libra, arXiv 2606.03077, C-MLFQ; the authors' code, github.com/NetX-lab/Libra).

    `rose.scheduler.causal_tree.Levels` says how: at a tool return, by what finished trajectories with the same outcomes
    had left; without evidence it stays. In its bucket it goes where its prefix is cached, else to the least loaded
    worker; if the bucket has no room, to a longer one, then to a shorter one (Libra's fallback: the other buckets, then
    any). `limits`: tokens of each bucket but the last, 5,000 in Libra's code. `shares`: of the workers, from the first
    bucket to the last, given out as they join. Libra's buckets are engines of different tensor-parallel degrees, and its
    planner sizes them; the shares are ours.
    """

    def __init__(self, limits: list[int], shares: list[float]) -> None:
        self._levels = Levels(limits, sinks=False)
        if len(shares) != len(limits) + 1 or not all(share > 0 for share in shares):
            raise ValueError(f"shares={shares}: a positive number per bucket, of which limits={limits} make "
                             f"{len(limits) + 1}")
        self.shares = [share / sum(shares) for share in shares]
        self._buckets: list[list[str]] = [[] for _ in shares]
        self._bucket: dict[str, int] = {}  # worker -> its bucket
        self._next = [0] * len(shares)  # where the next look into the bucket begins

    def heard(self, event: Event, cluster: Cluster) -> list:
        self._levels.heard(event, cluster)
        match event:
            case WorkerJoined(worker=worker):
                self._remove(worker)
                total = 1 + sum(map(len, self._buckets))
                owed = [share * total - len(b) for share, b in zip(self.shares, self._buckets, strict=True)]
                self._bucket[worker] = owed.index(max(owed))
                self._buckets[self._bucket[worker]].append(worker)
            case WorkerLost(worker=worker):
                self._remove(worker)
        return []

    def choose(self, turn: TurnState, fleet: Fleet, cluster: Cluster) -> WorkerState | None:
        level = self._levels.of(turn)
        home = cluster.home.get(turn.trajectory, "")
        for bucket in [*range(level, len(self.shares)), *reversed(range(level))]:
            worker = self._least(bucket, home, turn, fleet)
            if worker is not None:
                return worker
        return fleet.least(turn)

    def _least(self, bucket: int, home: str, turn: TurnState, fleet: Fleet) -> WorkerState | None:
        names = self._buckets[bucket]
        if self._bucket.get(home) == bucket and (worker := fleet.get(home, turn)) is not None:
            return worker
        start = self._next[bucket]
        self._next[bucket] = (start + 1) % max(1, len(names))
        looked = (fleet.get(names[(start + i) % len(names)], turn) for i in range(min(PROBES, len(names))))
        return min((w for w in looked if w is not None), key=lambda w: (w.revoked, w.load, w.worker), default=None)

    def _remove(self, worker: str) -> None:
        bucket = self._bucket.pop(worker, None)
        if bucket is not None:
            self._buckets[bucket].remove(worker)
