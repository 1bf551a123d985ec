"""The worker on which the turn ends first, by measured speeds."""

from __future__ import annotations

from rose.scheduler.events import Event, TrajectoryEnded
from rose.scheduler.fleet import Fleet
from rose.scheduler.routing.lengths import Lengths
from rose.scheduler.routing.speeds import Speeds
from rose.scheduler.state import Cluster, TurnState, WorkerState


class EarliestFinish:
    """Cached prefix, load, hardware and interference have one unit: the seconds until the turn ends
    (`Speeds`). Ours.

    Compared are the worker that has the prefix cached and the least loaded one of each pool of like
    workers, for the mean output of the turn's domain (at most a chunk); the smallest time wins,
    delay of the turns there included. After each `chunk_tokens` a turn is placed anew (Seer's
    divided rollout, arXiv 2511.14617; most stay). So a trajectory leaves its cached prefix when
    waiting costs more than prefill, and the last trajectories of a step, which alone decide its
    end, gather on the fastest engines. Until a pool has been measured it comes first, where the
    prefix is cached, else where least is to do. A trajectory begins only where its prefix can stay:
    while the mean context at the end of a trajectory, times those that have begun and not ended,
    fits in what all workers have now. More of them would evict each other's prefixes while their
    tools run, and be prefilled whole at every turn. `chunk_tokens` is ours: well above what prefill
    of a context costs.
    """

    def __init__(self, chunk_tokens: int) -> None:
        if chunk_tokens < 1:
            raise ValueError(f"chunk_tokens={chunk_tokens} must be at least 1")
        self.chunk_tokens = chunk_tokens
        self._speeds, self._lengths = Speeds(), Lengths()
        self._begun: dict[str, None] = {}  # trajectories that have begun and not ended
        # KV tokens of all ready workers, and decisions until it is summed anew
        self._kv, self._look_in = (0, 0)

    def heard(self, event: Event, cluster: Cluster) -> None:
        self._speeds.heard(event, cluster)
        self._lengths.heard(event, cluster)
        if isinstance(event, TrajectoryEnded):
            self._begun.pop(event.trajectory, None)

    def choose(self, turn: TurnState, fleet: Fleet, cluster: Cluster) -> WorkerState | None:
        if turn.trajectory not in self._begun and not self._fits_one_more(fleet):
            return None
        home = fleet.get(cluster.home.get(turn.trajectory, ""), turn)
        candidates = (
            fleet.least_of_each(turn) if home is None else [home, *fleet.least_of_each(turn)]
        )
        if not candidates:
            return None
        if len(candidates) == 1:  # mostly, where turns wait: nothing is to be compared
            worker = candidates[0]
        else:
            worker = min(candidates, key=lambda w: self._score(turn, w, w is home))
        self._speeds.sent(turn, worker, worker is home)
        self._begun[turn.trajectory] = None
        return worker

    def lane(self, turn: TurnState) -> bool:
        """A trajectory that can't begin yet holds up none that has."""
        return turn.trajectory in self._begun

    def _fits_one_more(self, fleet: Fleet) -> bool:
        self._look_in -= 1
        if self._look_in < 0:  # once per as many decisions as there are workers: O(1) each
            self._look_in, self._kv = len(fleet), sum(w.kv_tokens for w in fleet)
        return not self._begun or (len(self._begun) + 1) * self._lengths.final <= self._kv

    def chunk(self, turn: TurnState, worker: WorkerState) -> int:
        return self.chunk_tokens

    def _score(
        self, turn: TurnState, worker: WorkerState, cached: bool
    ) -> tuple[float, float, str]:
        output = self._lengths.of_domain(turn)
        seconds = self._speeds.seconds(turn, worker, min(output, self.chunk_tokens), cached)
        if seconds is None:
            return 0.0, 0.0 if cached else 1 + worker.load, worker.worker
        return seconds, worker.load, worker.worker
