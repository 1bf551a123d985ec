"""Elastic tensor parallelism: many engines of a small degree while a step has many turns, few of a
large degree in its tail (compare RollPacker, arXiv 2509.21009, and Libra's planner, arXiv
2606.03077)."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import deque
from typing import NamedTuple

from rose.policies.ours import AllIdle
from rose.scheduler.events import (
    Action,
    Event,
    RestWorker,
    Shape,
    TrajectoryEnded,
    TurnEnded,
    UseWorker,
    WorkerJoined,
    WorkerLost,
)
from rose.scheduler.state import Cluster, TurnState

# Finished trajectories whose lengths are remembered: a few steps with the papers' batch sizes
WINDOW = 512


class Elastic(AllIdle):
    """`all_idle` with elastic engines: of the engines that share GPUs (`WorkerJoined.shape`), the
    policy wakes those that suit the step's present load.

    Engines whose GPUs overlap form a block, and each block has one degree awake at a time. An
    engine that shares no GPU is always awake. At every tick the policy predicts for each degree how
    long the block's turns, and its share of the waiting turns, will take. The prediction is the
    product of
    - the seconds of a decode step. Its batch is the number of turns per engine, or the engine's
      `max_sequences` if that is less;
    - the tokens that a trajectory with the turns' mean length still generates: the mean over the
      longer ones among the last WINDOW trajectories;
    - the number of such batches, one after the other, in which an engine serves its turns.

    The block changes its degree if that saves more than it costs, and at least the share `gain` of
    the time. The cost is `switch_s` (aborted turns, weights copied over PCIe) plus the prefill of
    all contexts, by the times of the engine's shape. At the beginning the degree that joined first
    is awake. It wakes again if the block has lost its only awake engine.

    RollPacker doubles the degree for the next step if the preemptions exceed 1.05 times those of
    the step before, and halves it after four steps without preemptions. Libra chooses a mix of
    degrees by its cost model every 20 steps. Both decide between steps, so unlike this policy they
    can't adapt to the tail of a step.
    """

    simulated_only = True  # No live engines share GPUs.

    def __init__(
        self,
        n_serving: int,
        recent_s: float,
        hysteresis: float,
        activation_s: float,
        idle_s: float,
        hybrid_wait_s: float,
        gain: float,
        switch_s: float,
        hybrid_tail: float = 0.0,
    ) -> None:
        super().__init__(
            n_serving, recent_s, hysteresis, activation_s, idle_s, hybrid_wait_s, hybrid_tail
        )
        if not gain >= 0 or not switch_s >= 0:
            raise ValueError(f"gain={gain}, switch_s={switch_s}: not negative")
        self.gain, self.switch_s = gain, switch_s
        self._lengths = Residuals()
        # One dict per block: degree -> its workers, in the order in which the degrees joined
        self._blocks: list[dict[int, list[str]]] = []
        self._shaped: dict[str, Shape] = {}

    def on_event(self, event: Event, cluster: Cluster) -> list[Action]:
        actions = super().on_event(event, cluster)
        self._lengths.on_event(event, cluster)
        match event:
            case WorkerJoined(worker=name, shape=Shape() as shape):
                self._shaped[name] = shape
                self._find_blocks()
                others = [w for w in self._shaped if w != name and _overlap(self._shaped[w], shape)]
                if any(not cluster.workers[w].resting for w in others):
                    actions.append(RestWorker(name))
            case WorkerLost(worker=name) if name in self._shaped:
                del self._shaped[name]
                self._find_blocks()
        return actions

    def decide(self, at: float, cluster: Cluster) -> list[Action]:
        actions = super().decide(at, cluster)
        if not cluster.training:
            for degrees in self._blocks:
                actions += self._reshape(degrees, cluster)
        return actions

    def _find_blocks(self) -> None:
        """Group the engines into blocks by the overlap of their GPUs."""
        self._blocks, end = [], 0
        for name, shape in sorted(self._shaped.items(), key=lambda each: each[1].first):
            if shape.first >= end:
                self._blocks.append({})
            self._blocks[-1].setdefault(shape.degree, []).append(name)
            end = max(end, shape.first + shape.degree)

    def _reshape(self, degrees: dict[int, list[str]], cluster: Cluster) -> list[Action]:
        """Return the actions that change the degree of one block; [] to keep it."""
        now = next((d for d, names in degrees.items() if _awake(names, cluster)), None)
        if now is None:
            return [UseWorker(name) for name in next(iter(degrees.values()))]
        turns = [cluster.turns[t] for w in degrees[now] for t in cluster.workers[w].turns]
        waiting = cluster.waiting / len(self._blocks)
        if not turns:
            return []
        load = self._load(turns, waiting)
        seconds = {d: self._seconds(load, names, cluster) for d, names in degrees.items()}
        best = min(seconds, key=lambda d: (seconds[d], d != now))
        saved, cost = seconds[now] - seconds[best], self._cost(load, degrees[best])
        if best == now or saved <= cost or saved < self.gain * seconds[now]:
            return []
        return [RestWorker(w) for w in degrees[now]] + [UseWorker(w) for w in degrees[best]]

    def _load(self, turns: list[TurnState], waiting: float) -> Load:
        context = sum(t.context_tokens + t.made_tokens for t in turns) / len(turns)
        made = sum(self._lengths.made(t) for t in turns) / len(turns)
        return Load(len(turns) + waiting, context, self._lengths.left(made))

    def _seconds(self, load: Load, names: list[str], cluster: Cluster) -> float:
        """Return the seconds until trajectories like these have ended on the named engines."""
        shape, worker = self._shaped[names[0]], cluster.workers[names[0]]
        each = max(load.turns / len(names), 1.0)
        at_once = min(each, worker.max_sequences)
        step_s = shape.step_s + at_once * (shape.sequence_s + shape.context_s * load.context)
        return load.left * step_s * each / at_once

    def _cost(self, load: Load, names: list[str]) -> float:
        """Return the seconds that a change to the named engines costs."""
        prefill_s = self._shaped[names[0]].prefill_s * load.context * load.turns / len(names)
        return self.switch_s + prefill_s


class Load(NamedTuple):
    """Work of a block: its running turns and its share of the waiting turns."""

    turns: float  # number of turns
    context: float  # mean tokens of context
    left: float  # mean tokens that their trajectories have left


class Residuals:
    """Predicts the tokens that a trajectory still generates from those that it has generated."""

    def __init__(self) -> None:
        self._generated: dict[str, int] = {}  # trajectory -> tokens of its ended turns
        self._recent: deque[int] = deque()  # tokens of the last ended trajectories, oldest first
        self._ordered: list[int] = []  # the same, ascending

    def on_event(self, event: Event, cluster: Cluster) -> None:
        match event:
            case TurnEnded(turn=name, tokens=tokens):
                trajectory = cluster.turns[name].trajectory
                self._generated[trajectory] = self._generated.get(trajectory, 0) + tokens
            case TrajectoryEnded(trajectory=name, tokens=tokens):
                self._generated.pop(name, None)
                if tokens:  # 0 if it was cancelled and its length is unknown
                    if len(self._recent) == WINDOW:
                        self._ordered.remove(self._recent.popleft())
                    self._recent.append(tokens)
                    insort(self._ordered, tokens)

    def made(self, turn: TurnState) -> int:
        """Return the tokens that the turn's trajectory has generated so far."""
        return self._generated.get(turn.trajectory, 0) + turn.made_tokens

    def left(self, made: float) -> float:
        """Return the mean number of tokens that longer trajectories generated after their first
        `made`; 0 if there was no longer one."""
        longer = self._ordered[bisect_right(self._ordered, made) :]
        return sum(longer) / len(longer) - made if longer else 0.0


def _overlap(one: Shape, other: Shape) -> bool:
    return one.first < other.first + other.degree and other.first < one.first + one.degree


def _awake(names: list[str], cluster: Cluster) -> bool:
    return any(not cluster.workers[name].resting for name in names)
