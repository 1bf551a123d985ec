"""The result of a simulated run: its steps, its workers, and online serving beside it."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np


@dataclass(frozen=True)
class Step:
    """A training step; began <= training_at <= trained_at <= published_at <= ended, in seconds."""

    step: int
    began: float
    training_at: float  # time at which the batch was complete
    trained_at: float
    published_at: float
    ended: float  # time from which all dedicated workers held the new version
    tokens: int  # generated tokens of the batch
    trained_tokens: int  # all tokens of the batch, prompts and observations included
    trajectories: int
    reward: float  # mean of the batch
    staleness: tuple[int, ...]  # (groups,) versions between a group's admission and the training
    ahead_s: float = 0.0  # seconds of training on the batch's groups before training_at

    @property
    def seconds(self) -> float:
        return self.ended - self.began

    @property
    def rollout_s(self) -> float:
        return self.training_at - self.began

    @property
    def sync_s(self) -> float:
        return self.ended - self.trained_at


@dataclass(frozen=True)
class Worker:
    """An engine of the run."""

    name: str
    pool: str
    kind: str
    gpus: int
    held_s: float  # seconds between joining and leaving in which it was awake
    busy_s: float  # seconds in which it had a turn
    decoded: int  # tokens
    prefilled: int  # tokens, recomputed ones included
    preemptions: int
    _spans: array = field(repr=False)

    @cached_property
    def spans(self) -> np.ndarray:
        """Begin and end of each span in which it had turns, (n, 2) float64, seconds."""
        return (
            np.frombuffer(self._spans, np.float64).reshape(-1, 2)
            if len(self._spans)
            else np.zeros((0, 2))
        )


@dataclass(frozen=True)
class Latency:
    """Latency of online serving: shares of the requests within the targets; P99 in seconds."""

    ttft_attained: float
    tpot_attained: float
    ttft_p99_s: float
    tpot_p99_s: float


@dataclass(frozen=True)
class ServingUse:
    """Online serving on the devices of one cooperative pool."""

    pool: str
    requests: float
    beside: Latency  # latency with the run's rollouts
    alone: Latency  # latency if no rollout had run
    minute_requests: np.ndarray  # (minutes,)
    minute_attained: np.ndarray  # (minutes,) share within both targets; nan without requests
    minute_busy: np.ndarray  # (minutes,) share of time in which serving computes, device mean
    lent: float  # share of the devices' compute that rollouts get while they have work
    # P99 of the seconds between two tokens of a request: alone, beside rollouts; nan: unknown
    gap_p99_s: tuple[float, float]


@dataclass(frozen=True)
class Granted:
    """A worker that was requested, started as a spot instance, or woken up."""

    worker: str
    pool: str
    asked_at: float
    ready_at: float  # time from which it held the newest weights and could take turns

    @property
    def seconds(self) -> float:
        return self.ready_at - self.asked_at


@dataclass
class Counts:
    """The counters of a run."""

    turns: int = 0  # turns that ended
    migrations: int = 0  # later attempts at a turn on another worker than the attempt before
    chunks: int = 0  # attempts that ended at their limit of tokens, before the turn's end
    returned: int = 0  # turns that engines returned because memory was revoked
    aborted: int = 0  # attempts that the scheduler aborted: stalls, and workers put to sleep
    dropped_groups: int = 0
    dropped_tokens: int = 0  # generated tokens that no batch contains
    crashed: int = 0  # trajectories whose environment died
    crashed_tokens: int = 0
    refused: int = 0  # refused requests for capacity
    lost_workers: int = 0  # reclaimed spot instances
    decisions: int = 0  # events that the scheduler handled
    # with sandboxes:
    lost_hosts: int = 0
    recovered: int = 0  # continuations of a trajectory after its host was lost
    remade_tokens: int = 0  # tokens lost with a host, to be generated again
    moved: int = 0  # trajectories moved to less loaded hosts
    saved_bytes: float = 0.0  # bytes received by the store
    save_s: float = 0.0  # seconds that commands waited for classification and capture
    skipped_saves: int = 0  # captures for which a host had no room


@dataclass(frozen=True)
class Result:
    """The result of a run."""

    name: str
    seed: int
    seconds: float  # simulated time of the run
    steps: list[Step]
    workers: list[Worker]
    serving: list[ServingUse]
    allocations: list[Granted]
    counts: Counts
    events: int  # calls of the simulation's loop
    turn_s: np.ndarray  # (turns,) float32, from request to end of each turn that ended
    trajectory_s: np.ndarray  # (trajectories,) float32, duration of each that ended
    sandboxes: bool = False  # sandboxes were simulated

    @property
    def step_s(self) -> float:
        """Mean seconds of a step."""
        return float(np.mean([step.seconds for step in self.steps]))

    @property
    def tokens(self) -> int:
        """Generated tokens that were trained on."""
        return sum(step.tokens for step in self.steps)

    @property
    def throughput(self) -> float:
        """Generated tokens that were trained on, per second."""
        return self.tokens / self.seconds

    @property
    def allocation_s(self) -> float:
        """Worker-seconds between the request for a worker and its readiness."""
        return sum(granted.seconds for granted in self.allocations)

    def utilisation(self, kind: str) -> float:
        """Share of held GPU time in which workers of this kind had a turn; nan if none was held."""
        workers = [w for w in self.workers if w.kind == kind]
        held = sum(w.held_s * w.gpus for w in workers)
        return sum(w.busy_s * w.gpus for w in workers) / held if held else float("nan")
