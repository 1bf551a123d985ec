"""Libra (arXiv 2606.03077): C-MLFQ as order and as routing, and the planner of its hybrid pool."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Literal, NamedTuple

from rose.parts.rivals.causal_tree import Levels
from rose.scheduler.events import (
    Action,
    Event,
    RestWorker,
    Shape,
    StepBegun,
    TrajectoryEnded,
    UseWorker,
    VersionPublished,
    WorkerJoined,
    WorkerLost,
)
from rose.scheduler.fleet import Fleet
from rose.scheduler.state import Cluster, TurnState, WorkerState


class Mlfq:
    """Multi-level feedback queue whose levels follow from tool outcomes instead of a length
    prediction (Libra, arXiv 2606.03077, C-MLFQ; the authors' code, github.com/NetX-lab/Libra).
    `rose.parts.rivals.causal_tree.Levels` says how a trajectory moves between levels.

    `limits` are the tokens of each level but the last. Libra's code has two levels, short (5,000)
    and long, which are buckets of engines, as in `routing=libra`. As an order, `first=short` is the
    feedback queue, and `first=long` starts the tail early. Trajectories without evidence sink.

    So that no level starves, a turn waits only for turns of earlier levels that arrive within
    `patience` turns per level after it. This rule is ours. Live runs support all of it if the
    environments report whether tools failed; otherwise all outcomes are alike.
    """

    def __init__(self, limits: list[int], first: Literal["short", "long"], patience: int) -> None:
        if first not in ("short", "long"):
            raise ValueError(f"first={first!r}: short or long")
        if patience < 0:
            raise ValueError(f"patience={patience}: turns, 0 (first come, first served) or more")
        self.first, self.patience = first, patience
        self._levels = Levels(limits, sinks=True)

    def key(self, turn: TurnState, cluster: Cluster) -> int:
        level = self._levels.of(turn)
        rank = level if self.first == "short" else len(self._levels.limits) - level
        return turn.sequence + rank * self.patience

    def on_event(self, event: Event, cluster: Cluster) -> None:
        self._levels.on_event(event, cluster)


class LibraRouting:
    """Buckets of workers for short to long trajectories. Tool outcomes, not predicted lengths, move
    a trajectory between them (Libra, arXiv 2606.03077, C-MLFQ; the authors' code,
    github.com/NetX-lab/Libra).

    `rose.parts.rivals.causal_tree.Levels` gives the bucket; a trajectory without evidence stays. In
    its bucket a turn goes to the worker with its prefix cached, else to the least loaded. If the
    bucket has no room it goes to a longer one, then to a shorter one (Libra's fallback: the other
    buckets, then any).

    `limits` are the tokens of each bucket but the last, 5,000 in Libra's code. `shares` are the
    buckets' shares of the workers (ours); a worker joins the bucket with the largest deficit.
    Libra's buckets are engines of different tensor-parallel degrees, sized by its planner. For a
    run with such engines, `degrees` are the largest degrees of each bucket but the last.
    """

    def __init__(
        self, limits: list[int], shares: list[float], degrees: list[int] | None = None
    ) -> None:
        self._levels = Levels(limits, sinks=False)
        if degrees is not None and (
            len(degrees) != len(limits) or sorted(set(degrees)) != degrees or degrees[0] < 1
        ):
            raise ValueError(
                f"degrees={degrees}: ascending, at least 1, as many as limits={limits}"
            )
        self.degrees = degrees
        if len(shares) != len(limits) + 1 or not all(share > 0 for share in shares):
            raise ValueError(
                f"shares={shares}: a positive number per bucket, of which limits={limits} make "
                f"{len(limits) + 1}"
            )
        self.shares = [share / sum(shares) for share in shares]
        self._bucket: dict[str, int] = {}  # worker -> its bucket
        self._sizes = [0] * len(shares)  # number of workers of each bucket

    def on_event(self, event: Event, cluster: Cluster) -> list:
        self._levels.on_event(event, cluster)
        match event:
            case WorkerJoined(worker=worker, shape=shape):
                self._remove(worker)
                bucket = self._bucket[worker] = self._bucket_of(shape)
                self._sizes[bucket] += 1
            case WorkerLost(worker=worker):
                self._remove(worker)
        return []

    def _bucket_of(self, shape: Shape | None) -> int:
        """Return the bucket of a worker that joins: the one of its degree, else the bucket that is
        furthest below its share."""
        if self.degrees is not None and shape is not None:
            return bisect_left(self.degrees, shape.degree)
        total = 1 + len(self._bucket)
        sizes = zip(self.shares, self._sizes, strict=True)
        owed = [share * total - size for share, size in sizes]
        return owed.index(max(owed))

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
        """Return the bucket's worker `home`, or if it has no room the bucket's least loaded one."""
        if self._bucket.get(home) == bucket and (worker := fleet.get(home, turn)) is not None:
            return worker
        return fleet.least(turn, label=bucket)

    def _remove(self, worker: str) -> None:
        bucket = self._bucket.pop(worker, None)
        if bucket is not None:
            self._sizes[bucket] -= 1


ROUNDS = 40  # rounds of a bisection, which narrow its interval to 1e-12 of its width


class Measured(NamedTuple):
    """Measurements of a period, as those of one mean step."""

    lengths: list[int]  # tokens of the step's trajectories, longest first
    rate: float  # tokens per second of a rollout worker that has turns
    training_s: float  # seconds of training with the current split


class LibraPlanner:
    """Split the trainer's GPUs between training and rollout by predicted times (Libra, arXiv
    2606.03077, global resource planner with an elastic hybrid pool; github.com/NetX-lab/Libra,
    infra/cost_model). Simulated only: live, hybrid workers are used while the trainer waits, and
    not beside training.

    Every `period_steps` steps, each split is rated by the longer of a step's rollout and training,
    since these overlap.
    - Rollout: the trajectories of a step, sorted by length, are cut into contiguous parts, one per
      rollout worker, such that the longest part is as short as possible. A part takes its tokens
      divided by a worker's rate.
    - Training: inversely proportional to the number of workers that train.
    Rate and training time are measured; the authors use formulas and simulators. The best split is
    used if it saves more than `cost_s` seconds of a step, the cost of a change, and at least the
    share `gain` of the step. That is the authors' rule with their values, 15 s and 5 %. Their plans
    also choose tensor-parallel degrees; here all workers of a pool have the same.

    Hybrid workers train at first. GPUs worth `training_workers` workers always train; if that is 0,
    one hybrid worker always trains.
    """

    wakes_hybrids = False  # Hybrid workers are used beside training.
    simulated_only = True

    def __init__(
        self, period_steps: int, gain: float, cost_s: float, training_workers: int
    ) -> None:
        if period_steps < 1 or not gain >= 0 or not cost_s >= 0 or training_workers < 0:
            raise ValueError(
                f"period_steps={period_steps} must be at least 1, gain={gain}, cost_s={cost_s} and "
                f"training_workers={training_workers} not negative"
            )
        self.period_steps, self.gain, self.cost_s = period_steps, gain, cost_s
        self.training_workers = training_workers
        self._rollout = 0  # hybrid workers that roll out
        self._begun: float | None = None  # time at which the period began
        self._training_since: float | None = None
        self._reset()

    def _reset(self) -> None:
        """Clear the measurements of the period."""
        self._steps = 0
        self._training_s, self._trainings = 0.0, 0  # seconds of the trainings, and their number
        self._lengths: list[int] = []  # tokens of the trajectories that ended in the period
        self._busy_workers, self._polls = 0.0, 0  # workers with turns, summed over the polls

    def joins_resting(self, kind: str) -> bool:
        return kind == "hybrid"

    def on_event(self, event: Event, cluster: Cluster) -> list[Action]:
        if cluster.training and self._training_since is None:
            self._training_since = event.at
        match event:
            case TrajectoryEnded(tokens=tokens) if tokens:
                self._lengths.append(tokens)
            case VersionPublished(at=at) if self._training_since is not None:
                self._training_s += at - self._training_since
                self._trainings += 1
                self._training_since = None
            case StepBegun(at=at):
                if self._begun is None:
                    self._begun = at
                elif (steps := self._steps + 1) >= self.period_steps:
                    return self._plan(at, steps, cluster)
                else:
                    self._steps = steps
        return []

    def decide(self, at: float, cluster: Cluster) -> list[Action]:
        used = [w for w in cluster.workers.values() if not w.resting]
        if used:
            self._busy_workers += sum(bool(w.turns) for w in used)
            self._polls += 1
        return self._use_and_rest(cluster)

    def _plan(self, at: float, steps: int, cluster: Cluster) -> list[Action]:
        """Choose the split by the measurements of the period, and begin the next period."""
        busy_s = (at - self._begun) * self._busy_workers / self._polls if self._polls else 0.0
        if busy_s > 0 and self._lengths and self._training_s > 0 and _hybrid(cluster):
            found = Measured(
                sorted(self._lengths, reverse=True)[::steps],
                sum(self._lengths) / busy_s,
                self._training_s / self._trainings,
            )
            self._rollout = self._best_split(found, cluster)
        self._begun = at
        self._reset()
        return self._use_and_rest(cluster)

    def _best_split(self, found: Measured, cluster: Cluster) -> int:
        """Return the number of hybrid workers that roll out in the split with the shortest step if
        it is worth the change, else their present number."""
        hybrid = len(_hybrid(cluster))
        others = len(cluster.workers) - hybrid
        now = min(self._rollout, hybrid)
        whole = self.training_workers + hybrid
        most = hybrid if self.training_workers else hybrid - 1
        times = {
            n: max(makespan(found, others + n), found.training_s * (whole - now) / (whole - n))
            for n in range(most + 1)
            if others + n
        }
        best = min(times, key=lambda n: (times[n], abs(n - now)))
        saved = times.get(now, float("inf")) - times[best]
        worth = saved > self.cost_s and saved >= self.gain * times.get(now, 0.0)
        return best if worth else self._rollout

    def _use_and_rest(self, cluster: Cluster) -> list[Action]:
        """Return the actions that let `_rollout` hybrid workers roll out and the others rest."""
        return [
            UseWorker(w.worker) if i < self._rollout else RestWorker(w.worker)
            for i, w in enumerate(_hybrid(cluster))
            if w.resting == (i < self._rollout)
        ]


def makespan(found: Measured, workers: int) -> float:
    """Return the seconds in which `workers` generate a step's trajectories, cut in the best way."""
    low = max(found.lengths[0], sum(found.lengths) / workers) / found.rate
    high = low + found.lengths[0] / found.rate
    if _parts(found.lengths, low * found.rate) <= workers:
        return low
    for _ in range(ROUNDS):
        middle = (low + high) / 2
        if _parts(found.lengths, middle * found.rate) <= workers:
            high = middle
        else:
            low = middle
    return high


def _parts(lengths: Sequence[int], most: float) -> int:
    """Return the number of contiguous parts of at most `most` tokens into which `lengths` fit."""
    parts, held = 1, 0
    for length in lengths:
        held += length
        if held > most:
            parts, held = parts + 1, length
    return parts


def _hybrid(cluster: Cluster) -> list[WorkerState]:
    return [w for _, w in sorted(cluster.workers.items()) if w.kind == "hybrid"]
