"""Libra (arXiv 2606.03077): C-MLFQ as order and routing, and the planner of its hybrid pool."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from rose.policies.causal_tree import Levels
from rose.scheduler.events import (
    Action,
    Event,
    PlanReplicas,
    ReplicaLost,
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
    """Levels by the work that is left, told by causes, not by a length prediction (Libra, arXiv
    2606.03077, C-MLFQ; the authors' code, github.com/NetX-lab/Libra).
    `rose.policies.causal_tree.Levels` says how a trajectory moves.

    `limits`: tokens of each level but the last; Libra's code has short (5,000) and long. Its levels
    are buckets of engines, which is `routing=libra`; as an order, the first level goes `first`:
    `short` is the feedback queue, `long` starts the tail early. Here one without evidence sinks.
    Levels are not strict, or the last would starve: a turn goes behind those of the levels before
    its own that arrive within the next `patience` turns per level, which is ours. Live: nothing is
    missing, if the environments say whether tools failed; one that does not has one outcome.
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
    """Workers form buckets for short to long trajectories; tool outcomes, not length predictions,
    move a trajectory between them (Libra, arXiv 2606.03077, C-MLFQ; the authors' code,
    github.com/NetX-lab/Libra).

    `rose.policies.causal_tree.Levels` says how: at a tool return, by what finished trajectories
    with the same outcomes had left; without evidence it stays. In its bucket it goes where its
    prefix is cached, else to the least loaded worker; if the bucket has no room, to a longer one,
    then to a shorter one (Libra's fallback: the other buckets, then any). `limits`: tokens of each
    bucket but the last, 5,000 in Libra's code. `shares`: of the workers, from the first bucket to
    the last, given out as they join; ours. Libra's buckets are engines of different
    tensor-parallel degrees, and its planner sizes them: where a run has such, `degrees` says the
    largest of each bucket but the last.
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
        self._sizes = [0] * len(shares)  # workers of each

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
        """Of a worker that joins."""
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
        if self._bucket.get(home) == bucket and (worker := fleet.get(home, turn)) is not None:
            return worker
        return fleet.least(turn, label=bucket)

    def _remove(self, worker: str) -> None:
        bucket = self._bucket.pop(worker, None)
        if bucket is not None:
            self._sizes[bucket] -= 1


ROUNDS = 40  # of a bisection: to 1e-12 of its first interval


class Measured(NamedTuple):
    """Of one step, on average over a period."""

    lengths: list[int]  # tokens of its trajectories, longest first
    rate: float  # tokens per second of a rollout worker that has turns
    training_s: float  # by those that train now


class LibraPlanner:
    """Splits devices between training and rollout by predicted times (Libra, arXiv 2606.03077,
    global resource planner with an elastic hybrid pool; github.com/NetX-lab/Libra,
    infra/cost_model).

    Every `period_steps` steps each split is judged by max(rollout, training) of a step, as the two
    overlap. Rollout: the trajectories of a step, sorted by length, are cut into neighbouring parts,
    one for each rollout worker, such that the longest part takes least; a part takes as long as its
    tokens at a worker's rate. Training: inversely proportional to the workers that train. Rate and
    training are measured, where the authors have formulas and simulators. The best split is taken
    if it saves more than `cost_s` seconds of a step, which is what changing sides costs, and at
    least `gain` of it: the authors' rule with their values, 15 s and 5 %. Their plans also choose
    tensor-parallel degrees; here those of a pool are alike.

    Simulated, the trainer's GPUs are split. Hybrid workers train at first. `training_workers`: as
    many workers' worth of GPUs train and never roll out; without any one hybrid worker always
    trains.

    Live, dedicated workers with a replica are (trainer.elastic_replicas): those that are to train
    rest while the trainer works, `replicas` of them until the first plan, those with the fewest
    turns; one dedicated worker goes on at least. A split that was tried beside as many trainer
    ranks is judged by what training took in it, per token, when it last was; a training that lost a
    replica at work judges none. Rollout is longer by what resting workers miss.
    """

    def __init__(
        self,
        period_steps: int,
        gain: float,
        cost_s: float,
        training_workers: int,
        replicas: int = 0,
    ) -> None:
        if period_steps < 1 or not gain >= 0 or not cost_s >= 0 or training_workers < 0:
            raise ValueError(
                f"period_steps={period_steps} must be at least 1, gain={gain}, cost_s={cost_s} and "
                f"training_workers={training_workers} not negative"
            )
        if replicas < 0:
            raise ValueError(f"replicas={replicas}: of the dedicated workers, 0 or more")
        self.period_steps, self.gain, self.cost_s = period_steps, gain, cost_s
        self.training_workers, self.replicas = training_workers, replicas
        self._rollout = 0  # hybrid workers that roll out
        self._trainers = 0  # ranks beside which replicas train
        self._rested: list[str] = []  # workers that rest for the training that goes on
        self._lost = False  # one of their replicas, so that the trainer computes its rows
        self._token_s: dict[int, float] = {}  # replicas -> seconds of training per token, with them
        self._expected_s = 0.0  # of a step, by the last plan of replicas
        self._begun: float | None = None  # of the period
        self._training_since: float | None = None
        self._reset()

    def _reset(self) -> None:
        self._steps = 0
        self._training_s = 0.0
        self._trained_by: list[int] = []  # replicas, in each step that counts
        self._tokens = 0  # of these steps
        self._lengths: list[int] = []
        self._busy, self._looks = 0.0, 0

    def snapshot(self) -> dict[str, Any]:
        """What the plans of replicas have led to; {} before the first."""
        if not self._expected_s:
            return {}
        return {
            "replicas": self.replicas,
            "trainers": self._trainers,
            "token_s": sorted(self._token_s.items()),
            "expected_s": self._expected_s,
        }

    def restore(self, state: dict[str, Any]) -> None:
        self.replicas, self._expected_s = state["replicas"], state["expected_s"]
        self._trainers = state.get("trainers", 0)
        self._token_s = {count: token_s for count, token_s in state["token_s"]}

    def joins_resting(self, kind: str) -> bool:
        return kind == "hybrid"

    def on_event(self, event: Event, cluster: Cluster) -> list[Action]:
        if cluster.training and self._training_since is None:
            self._training_since = event.at
        match event:
            case TrajectoryEnded(tokens=tokens) if tokens:
                self._lengths.append(tokens)
            case VersionPublished() if self._training_since is not None:
                return self._trained(event, cluster)
            case ReplicaLost(worker=worker):
                self._lost |= worker in self._rested
            case StepBegun(at=at):
                if self._trainers and event.trainers != self._trainers:
                    self._token_s.clear()  # a restart has more ranks, or fewer
                self._trainers = event.trainers
                if self._begun is None:
                    self._begun = at
                elif (steps := self._steps + 1) >= self.period_steps:
                    return self._plan(at, event.step, steps, cluster)
                else:
                    self._steps = steps
        return []

    def decide(self, at: float, cluster: Cluster) -> list[Action]:
        used = [w for w in cluster.workers.values() if not w.resting]
        if used:
            self._busy += sum(bool(w.turns) for w in used)
            self._looks += 1
        return self._settle(cluster)

    def training_begins(self, cluster: Cluster) -> list[Action]:
        free = {w.worker: w for w in _dedicated(cluster) if not (w.resting or w.draining)}
        able = [free[name] for name in sorted(cluster.replicas) if name in free]
        able.sort(key=lambda w: len(w.turns))
        most = max(0, min(self.replicas, len(free) - 1))
        self._rested = [w.worker for w in able[:most]]
        return [RestWorker(name) for name in self._rested]

    def _trained(self, event: VersionPublished, cluster: Cluster) -> list[Action]:
        if not self._lost:
            self._training_s += event.at - self._training_since
            self._tokens += event.tokens
            self._trained_by.append(len(self._rested))
        self._training_since, self._lost = None, False
        rested, self._rested = self._rested, []
        workers = cluster.workers
        return [UseWorker(name) for name in rested if name in workers and workers[name].resting]

    def _plan(self, at: float, step: int, steps: int, cluster: Cluster) -> list[Action]:
        period_s = at - self._begun
        busy_s = period_s * self._busy / self._looks if self._looks else 0.0
        actions: list[Action] = []
        if busy_s > 0 and self._lengths and self._training_s > 0:
            found = Measured(
                sorted(self._lengths, reverse=True)[::steps],
                sum(self._lengths) / busy_s,
                self._training_s / len(self._trained_by),
            )
            if self._trainers:
                first = step + cluster.training  # its training has begun: the next, then
                actions.append(self._plan_replicas(found, first, period_s, steps, cluster))
            elif _hybrid(cluster):
                self._plan_hybrids(found, cluster)
        self._begun = at
        self._reset()
        return actions + self._settle(cluster)

    def _plan_hybrids(self, found: Measured, cluster: Cluster) -> None:
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
        self._rollout = self._better(times, now, self._rollout)

    def _plan_replicas(
        self, found: Measured, step: int, period_s: float, steps: int, cluster: Cluster
    ) -> PlanReplicas:
        dedicated = [w.worker for w in _dedicated(cluster)]
        most = max(0, min(len(cluster.replicas.intersection(dedicated)), len(dedicated) - 1))
        workers, by = len(cluster.workers), self._trained_by
        tokens, step_s = max(1, self._tokens) / len(by), period_s / steps
        if min(by) == max(by):
            self._token_s[by[0]] = found.training_s / tokens
        all_s = found.training_s * (self._trainers + sum(by) / len(by))  # of one that does it alone
        rollout_s, training_s = {}, {}
        for n in range(most + 1):
            tried = self._token_s.get(n)
            training_s[n] = all_s / (self._trainers + n) if tried is None else tried * tokens
            rollout_s[n] = makespan(found, workers) + n * training_s[n] / workers
        times = {n: max(rollout_s[n], training_s[n]) for n in training_s}
        before, now = self.replicas, min(self.replicas, most)  # some may be down
        best = self._better(times, now, now)
        self.replicas = before if best == now else best
        forecast_s = step_s * (times[best] / times[now])
        expected_s, self._expected_s = self._expected_s, forecast_s
        measured = step_s, rollout_s[now], found.training_s
        return PlanReplicas(step, self.replicas, before, forecast_s, *measured, expected_s)

    def _better(self, times: dict[int, float], now: int, otherwise: int) -> int:
        """The split that takes least, if it is worth the change."""
        best = min(times, key=lambda n: (times[n], abs(n - now)))
        saved = times.get(now, float("inf")) - times[best]
        worth = saved > self.cost_s and saved >= self.gain * times.get(now, 0.0)
        return best if worth else otherwise

    def _settle(self, cluster: Cluster) -> list[Action]:
        """To rollout, or back, one by one; what a worker has is taken elsewhere."""
        return [
            UseWorker(w.worker) if i < self._rollout else RestWorker(w.worker)
            for i, w in enumerate(_hybrid(cluster))
            if w.resting == (i < self._rollout)
        ]


def makespan(found: Measured, workers: int) -> float:
    """Seconds until `workers` have made a step's trajectories, cut as well as neighbours can be."""
    low = max(found.lengths[0], sum(found.lengths) / workers) / found.rate
    high = low + found.lengths[0] / found.rate
    if _parts(found.lengths, low * found.rate) <= workers:
        return low
    for _ in range(ROUNDS):
        middle = (low + high) / 2
        low, high = (
            (low, middle)
            if _parts(found.lengths, middle * found.rate) <= workers
            else (middle, high)
        )
    return high


def _parts(lengths: Sequence[int], most: float) -> int:
    """Parts of at most so many tokens into which neighbours are cut."""
    parts, held = 1, 0
    for length in lengths:
        held += length
        if held > most:
            parts, held = parts + 1, length
    return parts


def _hybrid(cluster: Cluster) -> list[WorkerState]:
    return [w for _, w in sorted(cluster.workers.items()) if w.kind == "hybrid"]


def _dedicated(cluster: Cluster) -> list[WorkerState]:
    return [w for _, w in sorted(cluster.workers.items()) if w.kind == "dedicated"]
