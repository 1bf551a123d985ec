"""RLBoost (arXiv 2510.19225): spot workers, and the trainer's GPUs at the beginning of a step."""

from __future__ import annotations

from rose.scheduler.events import (
    Action,
    Event,
    GroupFinished,
    RestWorker,
    StepBegun,
    TrajectoryEnded,
    UseWorker,
)
from rose.scheduler.state import Cluster, WorkerState

# Share of the imbalance by which the window changes per step; the value of the authors' code
GAIN = 1 / 3
# Weight of a new best window when throughput fell, and when the number of workers changed; the
# values of the authors' code
SETTLED = 0.8
CHANGED = 0.2


class RlBoost:
    """Spot workers roll out all the time. The trainer's own GPUs (hybrid workers) help for the
    first T_seed seconds of a step; then they rest, and their turns continue on spot workers with
    the tokens generated so far (RLBoost, arXiv 2510.19225, adaptive offload).

    T_seed balances two waits of the last step: t_trainer from the window's end to the start of
    training (the trainer idles), and t_rollout from there to the next step (the spot workers idle).
    T_seed += (t_trainer - t_rollout) / 3, but never below `minimum_s`. For each number of spot
    workers the best window is kept, the weighted mean of the windows at which tokens per second
    stopped growing. It is used at once when that number returns. Rule and constants are those of
    the authors' code (github.com/Terra-Flux/PolyRL, rollout-manager). Their trainer takes
    micro-batches during the rollout; ours waits for all groups, so the rule keeps more of the step
    in the window. Without a spot worker the window doesn't end.
    """

    def __init__(self, initial_s: float, minimum_s: float) -> None:
        if not initial_s >= minimum_s >= 0:
            raise ValueError(
                f"initial_s={initial_s} must be at least minimum_s={minimum_s}, and that not "
                "negative"
            )
        self.window_s, self.minimum_s = initial_s, minimum_s
        self._best: dict[int, float] = {}  # number of spot workers -> best window, seconds
        self._peak_s = initial_s  # window of the last step in which throughput grew, seconds
        self._throughput, self._spot, self._tokens = 0.0, 0, 0
        self._begun_at: float | None = None
        self._window_ended_at: float | None = None
        self._training_at: float | None = None

    def joins_resting(self, kind: str) -> bool:
        return kind == "hybrid"

    def on_event(self, event: Event, cluster: Cluster) -> list[Action]:
        match event:
            case TrajectoryEnded(tokens=tokens):
                self._tokens += tokens
            case StepBegun(at=at):
                begun, trained = self._begun_at, self._training_at
                if begun is not None and trained is not None and at > begun:
                    self._learn(at - begun, trained - begun, len(_of(cluster, "spot")))
                self._begun_at, self._tokens = at, 0
                self._window_ended_at = self._training_at = None
                return [UseWorker(w.worker) for w in _of(cluster, "hybrid") if w.resting]
            case GroupFinished(at=at) if cluster.training and self._begun_at is not None:
                return self.decide(at, cluster)
        return []

    def decide(self, at: float, cluster: Cluster) -> list[Action]:
        if self._begun_at is None:
            return []
        if cluster.training and self._training_at is None:
            self._training_at = at
        helped = any(w.accepts_turns and not w.loading for w in _of(cluster, "spot"))
        over = cluster.training or helped and at - self._begun_at >= self.window_s
        if over and self._window_ended_at is None:
            self._window_ended_at = at
        if not over:
            self._window_ended_at = None
        change = RestWorker if over else UseWorker
        return [change(w.worker) for w in _of(cluster, "hybrid") if w.resting != over]

    def _learn(self, step_s: float, rollout_s: float, spot: int) -> None:
        """Adapt the window to a step of these durations with `spot` spot workers."""
        throughput = self._tokens / step_s
        if spot != self._spot:
            self._remember(self._spot, CHANGED)
            self._spot, self._throughput = spot, 0.0
            if spot in self._best:
                self.window_s = self._peak_s = self._best[spot]
                return
        elif throughput > self._throughput:
            self._throughput, self._peak_s = throughput, self.window_s
        else:
            self._remember(spot, SETTLED)
            self._throughput = throughput
        ended = self._window_ended_at
        helped_s = rollout_s if ended is None else ended - self._begun_at
        trainer_waits, rollout_waits = rollout_s - helped_s, step_s - rollout_s
        self.window_s = max(self.window_s + GAIN * (trainer_waits - rollout_waits), self.minimum_s)

    def _remember(self, spot: int, weight: float) -> None:
        """Update the best window for this number of spot workers."""
        kept = self._best.get(spot, self._peak_s)
        self._best[spot] = (1 - weight) * kept + weight * self._peak_s


def _of(cluster: Cluster, kind: str) -> list[WorkerState]:
    return [w for _, w in sorted(cluster.workers.items()) if w.kind == kind]
