"""Engines that change shape: many of a small tensor-parallel degree while a step is full, few of a
large one in its tail (elastic parallelism of RollPacker, arXiv 2509.21009, and of Libra's planner,
arXiv 2606.03077)."""

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

WINDOW = 512  # trajectories whose lengths are remembered: a few steps of the papers' batches


class Elastic(AllIdle):
    """As `all_idle`, and engines that share GPUs (`WorkerJoined.shape`) wake and sleep as the
    phases of a step demand. Decided alike for each block, the GPUs of engines that overlap; an
    engine that shares none is always awake.

    At every tick a block's turns, with its part of those that wait, are judged in each shape: the
    seconds of a decode step with as many of them as an engine gets or takes, times the tokens that
    a trajectory of their length has left (mean of those of the last WINDOW that were longer), times
    the waves that it takes to serve all. Another shape is taken if it saves more than it costs and
    at least `gain` of the time. It costs `switch_s` (turns aborted, weights over PCIe into the
    engine that wakes) and prefill of all contexts. The step times are the engines' own. The first
    shape to join is awake at first, and where none is, as its engine was lost.

    RollPacker doubles the degree for the next step when preemptions exceed 1.05 times those before,
    and halves it after four steps without; Libra takes the fixed mix that its cost model prefers
    every 20 steps. Both decide between steps, and neither meets a step's own tail, which is what
    this policy is for.
    """

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
        # of each block: degree -> its workers, in the order of the degrees' joining
        self._blocks: list[dict[int, list[str]]] = []
        self._shaped: dict[str, Shape] = {}

    def on_event(self, event: Event, cluster: Cluster) -> list[Action]:
        actions = super().on_event(event, cluster)
        self._lengths.on_event(event, cluster)
        match event:
            case WorkerJoined(worker=name, shape=Shape() as shape):
                self._shaped[name] = shape
                self._arrange()
                others = [w for w in self._shaped if w != name and _overlap(self._shaped[w], shape)]
                if any(not cluster.workers[w].resting for w in others):
                    actions.append(RestWorker(name))
            case WorkerLost(worker=name) if name in self._shaped:
                del self._shaped[name]
                self._arrange()
        return actions

    def decide(self, at: float, cluster: Cluster) -> list[Action]:
        actions = super().decide(at, cluster)
        if not cluster.training:
            for degrees in self._blocks:
                actions += self._reshape(degrees, cluster)
        return actions

    def _arrange(self) -> None:
        self._blocks, end = [], 0
        for name, shape in sorted(self._shaped.items(), key=lambda each: each[1].first):
            if shape.first >= end:
                self._blocks.append({})
            self._blocks[-1].setdefault(shape.degree, []).append(name)
            end = max(end, shape.first + shape.degree)

    def _reshape(self, degrees: dict[int, list[str]], cluster: Cluster) -> list[Action]:
        """Of one block."""
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
        """Until trajectories such as these have ended on so many like engines."""
        shape, worker = self._shaped[names[0]], cluster.workers[names[0]]
        each = max(load.turns / len(names), 1.0)
        at_once = min(each, worker.max_sequences)
        step_s = shape.step_s + at_once * (shape.sequence_s + shape.context_s * load.context)
        return load.left * step_s * each / at_once

    def _cost(self, load: Load, names: list[str]) -> float:
        prefill_s = self._shaped[names[0]].prefill_s * load.context * load.turns / len(names)
        return self.switch_s + prefill_s


class Load(NamedTuple):
    turns: float  # to be served now
    context: float  # tokens, of each on average
    left: float  # tokens that a trajectory of theirs still makes


class Residuals:
    """How many tokens a trajectory has left, by those that it has made."""

    def __init__(self) -> None:
        self._made: dict[str, int] = {}  # trajectory -> tokens of its ended turns
        self._recent: deque[int] = deque()  # tokens of those that ended, in order of their ends
        self._ordered: list[int] = []

    def on_event(self, event: Event, cluster: Cluster) -> None:
        match event:
            case TurnEnded(turn=name, tokens=tokens):
                trajectory = cluster.turns[name].trajectory
                self._made[trajectory] = self._made.get(trajectory, 0) + tokens
            case TrajectoryEnded(trajectory=name, tokens=tokens):
                self._made.pop(name, None)
                if tokens:  # 0: cancelled, and its length unknown
                    if len(self._recent) == WINDOW:
                        self._ordered.remove(self._recent.popleft())
                    self._recent.append(tokens)
                    insort(self._ordered, tokens)

    def made(self, turn: TurnState) -> int:
        """Tokens of its trajectory so far."""
        return self._made.get(turn.trajectory, 0) + turn.made_tokens

    def left(self, made: float) -> float:
        """Mean of what those that were longer had left; 0: none was."""
        longer = self._ordered[bisect_right(self._ordered, made) :]
        return sum(longer) / len(longer) - made if longer else 0.0


def _overlap(one: Shape, other: Shape) -> bool:
    return one.first < other.first + other.degree and other.first < one.first + one.degree


def _awake(names: list[str], cluster: Cluster) -> bool:
    return any(not cluster.workers[name].resting for name in names)
