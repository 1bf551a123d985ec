"""What a simulated run was like."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np


@dataclass(frozen=True)
class Step:
    """Times in seconds of the simulation; began <= training_at <= trained_at <= published_at <=
    ended."""

    step: int
    began: float
    training_at: float  # the batch is complete
    trained_at: float
    published_at: float
    ended: float  # dedicated workers hold the new version
    tokens: int  # generated ones in the batch
    trained_tokens: int  # all of the batch, prompts and observations included
    trajectories: int
    reward: float  # mean of the batch
    staleness: tuple[int, ...]  # of each group of the batch, versions
    ahead_s: float = 0.0  # in which the trainer worked on it before training_at

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
    """One engine. `spans`: (n, 2) float64, seconds in which it had a turn. `held_s`: in which it
    was ours: joined, and not resting."""

    name: str
    pool: str
    kind: str
    gpus: int
    held_s: float
    busy_s: float
    decoded: int  # tokens
    prefilled: int  # tokens, recomputed ones included
    preemptions: int
    _spans: array = field(repr=False)

    @cached_property
    def spans(self) -> np.ndarray:
        return (
            np.frombuffer(self._spans, np.float64).reshape(-1, 2)
            if len(self._spans)
            else np.zeros((0, 2))
        )


@dataclass(frozen=True)
class Latency:
    """Online serving over the run: shares of the requests within their targets, and 99th
    percentiles in seconds."""

    ttft_attained: float
    tpot_attained: float
    ttft_p99_s: float
    tpot_p99_s: float


@dataclass(frozen=True)
class ServingUse:
    """Of one cooperative pool. Arrays: one element per minute. Alone: as if no rollout had run."""

    pool: str
    requests: float
    beside: Latency
    alone: Latency
    minute_requests: np.ndarray
    minute_attained: np.ndarray  # share within both targets; nan without requests
    minute_busy: np.ndarray  # share of the time in which serving computes, mean of the devices
    lent: float  # share of the devices' compute that rollouts get while they have work
    # between two tokens of a request: alone, and while rollouts compute; nan: unknown
    gap_p99_s: tuple[float, float]


@dataclass(frozen=True)
class Granted:
    """A worker that was asked for, or called to work."""

    worker: str
    pool: str
    asked_at: float
    ready_at: float  # it holds weights and can take turns

    @property
    def seconds(self) -> float:
        return self.ready_at - self.asked_at


@dataclass
class Counts:
    turns: int = 0  # ended
    migrations: int = 0  # attempts after a turn's first, chunks aside
    chunks: int = 0
    returned: int = 0  # turns that engines gave back, memory having been called back
    aborted: int = 0  # attempts that the scheduler ended: stalls, and workers put to rest
    dropped_groups: int = 0
    dropped_tokens: int = 0  # generated, and of no use
    crashed: int = 0  # trajectories whose environment died
    crashed_tokens: int = 0
    refused: int = 0  # requests for capacity
    lost_workers: int = 0
    decisions: int = 0  # events that the scheduler took
    # with sandboxes
    lost_hosts: int = 0
    recovered: int = 0  # times that a trajectory went on after its host was lost
    remade_tokens: int = 0  # made, lost with a host and to be made again
    moved: int = 0  # trajectories, to less loaded hosts
    saved_bytes: float = 0.0  # that came to the store
    save_s: float = 0.0  # that commands waited for looks and captures
    skipped_saves: int = 0  # captures for which a host had no room


@dataclass(frozen=True)
class Result:
    name: str
    seed: int
    seconds: float  # simulated
    steps: list[Step]
    workers: list[Worker]
    serving: list[ServingUse]
    allocations: list[Granted]
    counts: Counts
    events: int  # of the simulation's loop
    turn_s: np.ndarray  # float32, of each turn that ended, from its request to its end
    trajectory_s: np.ndarray  # float32, of each trajectory that ended
    sandboxes: bool = False  # they were simulated

    @property
    def step_s(self) -> float:
        """Mean of the steps."""
        return float(np.mean([step.seconds for step in self.steps]))

    @property
    def tokens(self) -> int:
        """Generated and trained on."""
        return sum(step.tokens for step in self.steps)

    @property
    def throughput(self) -> float:
        """Generated tokens trained on, per second."""
        return self.tokens / self.seconds

    @property
    def allocation_s(self) -> float:
        """Worker-seconds between asking for a worker and its first turn."""
        return sum(granted.seconds for granted in self.allocations)

    def utilisation(self, kind: str) -> float:
        """Share of the time for which workers of this kind were held in which they had a turn; nan
        without any."""
        workers = [w for w in self.workers if w.kind == kind]
        held = sum(w.held_s * w.gpus for w in workers)
        return sum(w.busy_s * w.gpus for w in workers) / held if held else float("nan")
