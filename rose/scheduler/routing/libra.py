"""Libra's length buckets."""

from __future__ import annotations

from rose.scheduler.causal_tree import Levels
from rose.scheduler.events import Event, WorkerJoined, WorkerLost
from rose.scheduler.fleet import Fleet
from rose.scheduler.state import Cluster, TurnState, WorkerState


class Libra:
    """Workers form buckets for short to long trajectories; tool outcomes, not length predictions,
    move a trajectory between them (Libra, arXiv 2606.03077, C-MLFQ; the authors' code,
    github.com/NetX-lab/Libra).

    `rose.scheduler.causal_tree.Levels` says how: at a tool return, by what finished trajectories
    with the same outcomes had left; without evidence it stays. In its bucket it goes where its
    prefix is cached, else to the least loaded worker; if the bucket has no room, to a longer one,
    then to a shorter one (Libra's fallback: the other buckets, then any). `limits`: tokens of each
    bucket but the last, 5,000 in Libra's code. `shares`: of the workers, from the first bucket to
    the last, given out as they join. Libra's buckets are engines of different tensor-parallel
    degrees, and its planner sizes them; the shares are ours.
    """

    def __init__(self, limits: list[int], shares: list[float]) -> None:
        self._levels = Levels(limits, sinks=False)
        if len(shares) != len(limits) + 1 or not all(share > 0 for share in shares):
            raise ValueError(
                f"shares={shares}: a positive number per bucket, of which limits={limits} make "
                f"{len(limits) + 1}"
            )
        self.shares = [share / sum(shares) for share in shares]
        self._bucket: dict[str, int] = {}  # worker -> its bucket
        self._sizes = [0] * len(shares)  # workers of each

    def heard(self, event: Event, cluster: Cluster) -> list:
        self._levels.heard(event, cluster)
        match event:
            case WorkerJoined(worker=worker):
                self._remove(worker)
                total = 1 + len(self._bucket)
                owed = [
                    share * total - size
                    for share, size in zip(self.shares, self._sizes, strict=True)
                ]
                bucket = self._bucket[worker] = owed.index(max(owed))
                self._sizes[bucket] += 1
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

    def label(self, worker: str) -> int:
        return self._bucket[worker]

    def _least(self, bucket: int, home: str, turn: TurnState, fleet: Fleet) -> WorkerState | None:
        if self._bucket.get(home) == bucket and (worker := fleet.get(home, turn)) is not None:
            return worker
        return fleet.least(turn, label=bucket)

    def _remove(self, worker: str) -> None:
        bucket = self._bucket.pop(worker, None)
        if bucket is not None:
            self._sizes[bucket] -= 1
