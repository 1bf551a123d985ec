"""Libra's global planner."""

from __future__ import annotations

from rose.scheduler.events import Action, Event, RestWorker, StepBegun, UseWorker, VersionPublished
from rose.scheduler.state import Cluster, WorkerState


class Libra:
    """Splits the hybrid workers between rollout and training by predicted times (Libra, arXiv 2606.03077, global
    resource planner with an elastic hybrid pool).

    Over `period_steps` steps it measures the seconds of a step that are training, and those that are rollout: the
    step's length times the share of the rollout workers that have turns, so that rollouts which wait for the trainer
    don't count. Both are taken as inversely proportional to their workers. Of all splits the one with the smallest
    max(rollout, training), as the two overlap, is taken if it promises at least `gain` (share of the step); the smaller
    change wins a tie. Workers change sides one by one and nothing stops for it: a hybrid worker's turns move on.
    `training_workers`: as many workers' worth of GPUs train and never roll out. Numbers of `conf` are ours.
    """

    def __init__(self, period_steps: int, gain: float, training_workers: int) -> None:
        if period_steps < 1 or not gain >= 0 or training_workers < 0:
            raise ValueError(f"period_steps={period_steps} must be at least 1, gain={gain} and "
                             f"training_workers={training_workers} not negative")
        self.period_steps, self.gain, self.training_workers = period_steps, gain, training_workers
        self._rollout: int | None = None  # hybrid workers that roll out; None: all, nothing is measured yet
        self._begun: float | None = None  # of the period
        self._steps = 0
        self._training_s = 0.0
        self._training_since: float | None = None
        self._busy, self._looks = 0.0, 0

    def heard(self, event: Event, cluster: Cluster) -> list[Action]:
        match event:
            case VersionPublished(at=at) if self._training_since is not None:
                self._training_s += at - self._training_since
                self._training_since = None
            case StepBegun(at=at):
                self._steps += 1
                if self._begun is None or self._steps > self.period_steps:
                    return self._plan(at, cluster)
        return []

    def decide(self, at: float, cluster: Cluster) -> list[Action]:
        if cluster.training and self._training_since is None:
            self._training_since = at
        used = [w for w in cluster.workers.values() if not w.resting]
        if used:
            self._busy += sum(bool(w.turns) for w in used) / len(used)
            self._looks += 1
        return self._settle(cluster)

    def _plan(self, at: float, cluster: Cluster) -> list[Action]:
        hybrid = len(_hybrid(cluster))
        others = len(cluster.workers) - hybrid
        if self._begun is not None and hybrid and self._looks:
            now = hybrid if self._rollout is None else min(self._rollout, hybrid)
            rollout_s = (at - self._begun) * self._busy / self._looks * (others + now)
            training_s = self._training_s * (self.training_workers + hybrid - now)
            times = {n: self._time(n, hybrid, others, rollout_s, training_s) for n in range(hybrid + 1)}
            best = min(times, key=lambda n: (times[n], abs(n - now)))
            if times[best] <= (1 - self.gain) * times[now]:
                self._rollout = best
        self._begun, self._steps, self._training_s, self._busy, self._looks = at, 1, 0.0, 0.0, 0
        return self._settle(cluster)

    def _time(self, n: int, hybrid: int, others: int, rollout_s: float, training_s: float) -> float:
        """Of the period, with `n` hybrid workers that roll out; the work in worker-seconds."""
        rollout, training = others + n, self.training_workers + hybrid - n
        if not rollout or training_s and not training:
            return float("inf")
        return max(rollout_s / rollout, training_s / max(training, 1))

    def _settle(self, cluster: Cluster) -> list[Action]:
        workers = _hybrid(cluster)
        wanted = len(workers) if self._rollout is None else self._rollout
        return [UseWorker(w.worker) if i < wanted else RestWorker(w.worker)
                for i, w in enumerate(workers) if w.resting == (i < wanted)]


def _hybrid(cluster: Cluster) -> list[WorkerState]:
    return [w for _, w in sorted(cluster.workers.items()) if w.kind == "hybrid"]
