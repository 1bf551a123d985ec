"""Libra's global planner."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from rose.scheduler.events import (
    Action,
    Event,
    RestWorker,
    StepBegun,
    TrajectoryEnded,
    UseWorker,
    VersionPublished,
)
from rose.scheduler.state import Cluster, WorkerState

ROUNDS = 40  # of a bisection: to 1e-12 of its first interval


class Measured(NamedTuple):
    """Of one step, on average over a period."""

    lengths: list[int]  # tokens of its trajectories, longest first
    rate: float  # tokens per second of a rollout worker that has turns
    training: float  # worker-seconds


class Libra:
    """Splits the trainer's GPUs between training and rollout by predicted times (Libra, arXiv
    2606.03077, global resource planner with an elastic hybrid pool; github.com/NetX-lab/Libra,
    infra/cost_model).

    Every `period_steps` steps each split is judged by max(rollout, training) of a step, as the two
    overlap. Rollout: the trajectories of a step, sorted by length, are cut into neighbouring parts,
    one for each rollout worker, such that the longest part takes least; a part takes as long as its
    tokens at a worker's rate. Training: inversely proportional to the workers that train. Rate and
    training are measured, where the authors have formulas and simulators. The best split is taken
    if it saves more than `cost_s` seconds of a step, which is what changing sides costs, and at
    least `gain` of it: the authors' rule with their values, 15 s and 5 %. Their plans also choose
    tensor-parallel degrees; here those of a pool are alike.

    Hybrid workers train at first. `training_workers`: as many workers' worth of GPUs train and
    never roll out; without any one hybrid worker always trains.
    """

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
        self._begun: float | None = None  # of the period
        self._training_since: float | None = None
        self._reset()

    def _reset(self) -> None:
        self._steps = 0
        self._training_s = 0.0
        self._lengths: list[int] = []
        self._busy, self._looks = 0.0, 0

    def joins_resting(self, kind: str) -> bool:
        return kind == "hybrid"

    def heard(self, event: Event, cluster: Cluster) -> list[Action]:
        match event:
            case TrajectoryEnded(tokens=tokens) if tokens:
                self._lengths.append(tokens)
            case VersionPublished(at=at) if self._training_since is not None:
                self._training_s += at - self._training_since
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
        if cluster.training and self._training_since is None:
            self._training_since = at
        used = [w for w in cluster.workers.values() if not w.resting]
        if used:
            self._busy += sum(bool(w.turns) for w in used)
            self._looks += 1
        return self._settle(cluster)

    def _plan(self, at: float, steps: int, cluster: Cluster) -> list[Action]:
        hybrid = len(_hybrid(cluster))
        others = len(cluster.workers) - hybrid
        now = min(self._rollout, hybrid)
        busy_s = (at - self._begun) * self._busy / self._looks if self._looks else 0.0
        if hybrid and busy_s and self._lengths and self._training_s:
            found = Measured(
                sorted(self._lengths, reverse=True)[::steps],
                sum(self._lengths) / busy_s,
                self._training_s / steps * (self.training_workers + hybrid - now),
            )
            most = hybrid if self.training_workers else hybrid - 1
            times = {
                n: max(
                    makespan(found, others + n),
                    found.training / (self.training_workers + hybrid - n),
                )
                for n in range(most + 1)
                if others + n
            }
            best = min(times, key=lambda n: (times[n], abs(n - now)))
            saved = times.get(now, float("inf")) - times[best]
            if saved > self.cost_s and saved >= self.gain * times.get(now, 0.0):
                self._rollout = best
        self._begun = at
        self._reset()
        return self._settle(cluster)

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
