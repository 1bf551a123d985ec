"""Libra's length buckets."""

from __future__ import annotations

from rose.scheduler.events import Event, TrajectoryEnded, WorkerJoined, WorkerLost
from rose.scheduler.fleet import Fleet
from rose.scheduler.state import Cluster, TurnState, WorkerState

PROBES = 16  # workers of a bucket looked at for one turn: the best of 16 is close to the least loaded, at O(1)


class Libra:
    """Workers form buckets for short to long trajectories; tool outcomes, not length predictions, move a trajectory
    between them (Libra, arXiv 2606.03077, C-MLFQ: causality-driven multi-level feedback queue).

    Every trajectory begins in the first bucket. A tool call that failed means further attempts, so a longer context:
    each moves it one bucket up, as far as the last. In its bucket it goes where its prefix is cached, else to the least
    loaded worker; if the bucket has no room, to a longer one, then to a shorter one (work-conserving). `shares`: of the
    workers, from the first bucket to the last, given out as they join. Number and shares of the buckets are ours.
    """

    def __init__(self, shares: list[float]) -> None:
        if not shares or not all(share > 0 for share in shares):
            raise ValueError(f"shares={shares}: one positive number per bucket")
        self.shares = [share / sum(shares) for share in shares]
        self._buckets: list[list[str]] = [[] for _ in shares]
        self._bucket: dict[str, int] = {}  # worker -> its bucket
        self._next = [0] * len(shares)  # where the next look into the bucket begins
        self._level: dict[str, tuple[int, str]] = {}  # trajectory -> bucket, and the turn that was last judged

    def heard(self, event: Event, cluster: Cluster) -> list:
        match event:
            case TrajectoryEnded(trajectory=trajectory):
                self._level.pop(trajectory, None)
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
        level = self._judge(turn)
        home = cluster.home.get(turn.trajectory, "")
        for bucket in [*range(level, len(self.shares)), *reversed(range(level))]:
            worker = self._least(bucket, home, turn, fleet)
            if worker is not None:
                return worker
        return fleet.least(turn)

    def _judge(self, turn: TurnState) -> int:
        level, judged = self._level.get(turn.trajectory, (0, ""))
        if judged != turn.turn:
            level = min(level + (turn.outcome == "failed"), len(self.shares) - 1)
            self._level[turn.trajectory] = level, turn.turn
        return level

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
