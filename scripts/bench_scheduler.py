"""Measure the cost of a decision of the scheduler, by cluster size and policy.

    python scripts/bench_scheduler.py                                    # 100, 1,000 and 10,000 workers (2 minutes)
    python scripts/bench_scheduler.py --sizes 100 --policies rose --csv docs/results/bench_scheduler.csv

Workers hold 4 turns each, and there are 5 times as many trajectories, of 8 turns, in groups of 16.
So a fifth of the turns waits. The driver ends a random running turn, and its trajectory requests
the next one, or a new trajectory replaces it. Between them come ticks, capacities that shrink and
grow, returned turns, lost and joined workers. When a step is trained, every worker loads a version
while turns continue. Joining and the first assignments aren't counted. Each `handle(event)` is
timed by the thread's CPU clock, which other programs hardly change, without garbage collection.
"""

from __future__ import annotations

import gc
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rose.config import Policy
from rose.config import Scheduler as SchedulerConfig
from rose.policies import build
from rose.scheduler import Scheduler
from rose.scheduler import events as ev
from scripts.csv_tables import REPOSITORY, show, write_csv
from scripts.harness import flagged, listed

SEQUENCES, KV_TOKENS, GROUP, TURNS = 4, 40_000, 16, 8
# name -> (provisioning, routing, order, batching)
SYSTEMS = {
    "fixed": ("fixed", "least_loaded", "fifo", "synchronous"),
    "affine": ("on_demand", "cache_affine", "fifo", "synchronous"),
    "rose": ("rose", "rose", "fifo", "one_step_off"),
    "areal": ("fixed", "cache_affine", "fifo", "bounded_staleness"),
    "rlboost": ("rlboost", "least_loaded", "fifo", "synchronous"),
    "rollpacker": ("fixed", "least_loaded", "fifo", "tail_batching"),
    "seer": ("fixed", "seer", "longest_first", "synchronous"),
    "libra": ("libra", "libra", "mlfq", "bounded_staleness"),
    "rollart": ("serverless", "rollart", "fifo", "trajectory_async"),
    "prism": ("static", "least_loaded", "fifo", "synchronous"),
    "best": ("all_idle", "rose", "fifo", "bounded_staleness"),
}
KINDS = ("provisioning", "routing", "order", "batching")
# Workers of these kinds join by turns, of both kinds of hardware.
WORKERS, HARDWARE = ("dedicated", "dedicated", "cooperative", "spot", "hybrid"), ("H800", "H20")


def policy(kind: str, name: str) -> Policy:
    """Return the policy as conf/scheduler has it, with up to 1,000 lent workers."""
    text = (REPOSITORY / "conf" / "scheduler" / kind / f"{name}.yaml").read_text(encoding="utf-8")
    return Policy(**yaml.safe_load(text.replace("${serving.max_ranks}", "1000")))


def scheduler(names: tuple[str, ...]) -> Scheduler:
    chosen = {kind: policy(kind, name) for kind, name in zip(KINDS, names, strict=True)}
    return build(SchedulerConfig(**chosen, queue_depth=0.0), turn_timeout_s=60.0)


class Load:
    """Drives a scheduler at constant concurrency, and times it."""

    def __init__(self, scheduler: Scheduler, workers: int) -> None:
        self.scheduler, self.draw = scheduler, np.random.default_rng(1)
        self.costs: dict[str, list[int]] = {}  # nanoseconds of each event, by the event's type
        self.at = 0.0
        self.borrowed: list[str] = []
        self.running: list[str] = []  # turns that workers hold
        self.place: dict[str, int] = {}  # turn -> its index in `running`
        self.attempt: dict[str, tuple[str, int]] = {}  # turn -> (worker, attempt)
        self.left: dict[str, int] = {}  # trajectory -> turns left
        self.group: dict[str, list[str]] = {}  # group -> unfinished trajectories
        self.ready: deque[str] = deque()  # turns to be requested
        self.version, self.step, self.loads = 0, 0, deque()
        self.wanted = 5 * workers
        self.feed(ev.VersionPublished, version=0)
        for i in range(workers):
            self.join(i)
        self.begin()

    # ----------------------------------------------------------------- what happens

    def join(self, i: int) -> None:
        kind, hardware = WORKERS[i % len(WORKERS)], HARDWARE[i % len(WORKERS) % 2]
        name = f"worker-{i}"
        if kind in ("cooperative", "spot") and i < len(self.scheduler.cluster.workers) + 1:
            self.borrowed.append(name)
        own = {"kind": kind, "hardware": hardware, "version": self.version}
        self.feed(ev.WorkerJoined, worker=name, max_sequences=SEQUENCES, kv_tokens=KV_TOKENS, **own)

    def begin(self) -> None:
        self.step += 1
        self.feed(ev.StepBegun, step=self.step, groups=max(self.wanted // GROUP, 1))

    def fill(self) -> None:
        """Request all turns that are ready, so that the concurrency stays constant."""
        while self.ready:
            turn = self.ready.popleft()
            trajectory, _, number = turn.rpartition(".t")
            if trajectory not in self.left:
                continue  # dropped trajectory
            own = {"turn": turn, "trajectory": trajectory, "group": trajectory.partition(".")[0]}
            own["context_tokens"] = 500 * (1 + int(number))
            own["max_new_tokens"] = int(self.draw.integers(200, 6000))
            own["domain"] = ("maths", "web")[len(trajectory) % 2]
            own["outcome"] = ("ok", "failed")[int(self.draw.random() < 0.2)]
            self.feed(ev.TurnRequested, **own)

    def end(self, turn: str) -> None:
        tokens = int(self.draw.integers(50, 2000))
        self.forget(turn)
        self.feed(ev.TurnEnded, turn=turn, tokens=tokens)
        trajectory, _, number = turn.rpartition(".t")
        self.left[trajectory] -= 1
        if self.left[trajectory]:
            self.ready.append(f"{trajectory}.t{int(number) + 1}")
            return
        del self.left[trajectory]
        self.feed(ev.TrajectoryEnded, trajectory=trajectory, tokens=tokens * TURNS)
        group = trajectory.partition(".")[0]
        self.group[group].remove(trajectory)
        if not self.group[group]:
            del self.group[group]
            self.feed(ev.GroupFinished, group=group, accepted=True)

    def disturb(self, n: int) -> None:
        """Feed rare events, once in 500 others: a tick, and a change of a borrowed worker."""
        self.feed(ev.Tick)
        name = self.borrowed[int(self.draw.integers(len(self.borrowed)))]
        match n % 5:
            case 0 | 1:
                share = float(self.draw.choice([0.0, 0.25, 0.5, 1.0]))
                self.capacity(name, share, -1.0)
            case 2 if self.running:
                turn = self.running[int(self.draw.integers(len(self.running)))]
                worker, attempt = self.attempt[turn]
                self.forget(turn)
                self.feed(ev.TurnReturned, turn=turn, attempt=attempt)
                self.capacity(worker, 1.0, 0.0)
            case 3:
                for turn in list(self.scheduler.cluster.workers[name].turns):
                    self.forget(turn)
                self.feed(ev.WorkerLost, worker=name, reason="preempted")
                self.join(int(name.partition("-")[2]))

    def capacity(self, worker: str, share: float, expected_s: float) -> None:
        kv, seats = int(KV_TOKENS * share), SEQUENCES if share else 0
        own = {"max_sequences": seats, "expected_s": expected_s, "revoked": share < 1}
        self.feed(ev.WorkerCapacity, worker=worker, kv_tokens=kv, **own)

    def run(self, events: int) -> None:
        for n in range(events):
            self.at += 0.001
            self.fill()
            if self.loads:
                worker, version = self.loads.popleft()
                self.feed(ev.WorkerLoaded, worker=worker, version=version)
            if self.running:
                self.end(self.running[int(self.draw.integers(len(self.running)))])
            if n % 500 == 0:
                self.disturb(n // 500)

    # ----------------------------------------------------------------- what the scheduler says

    def feed(self, type_: type[ev.Event], /, **fields: Any) -> None:
        event = type_(at=self.at, **fields)
        began = time.thread_time_ns()
        actions = self.scheduler.handle(event)
        self.costs.setdefault(type(event).__name__, []).append(time.thread_time_ns() - began)
        for action in sorted(actions, key=lambda a: not isinstance(a, ev.AbortTurn)):
            match action:
                case ev.AssignTurn(turn, worker, attempt):
                    self.place[turn], self.attempt[turn] = len(self.running), (worker, attempt)
                    self.running.append(turn)
                case ev.AbortTurn(turn):
                    self.forget(turn)
                case ev.LoadWeights(worker, version):
                    self.loads.append((worker, version))
                case ev.AdmitGroup(_, group):
                    self.admit(group)
                case ev.DropGroup(group):
                    self.drop(group)
                case ev.StartTraining():
                    self.version += 1
                    self.feed(ev.VersionPublished, version=self.version)
                    self.begin()

    def admit(self, group: str) -> None:
        self.group[group] = [f"{group}.{i}" for i in range(GROUP)]
        for trajectory in self.group[group]:
            self.left[trajectory] = TURNS
            self.ready.append(f"{trajectory}.t0")

    def drop(self, group: str) -> None:
        for trajectory in self.group.pop(group, ()):
            del self.left[trajectory]
            for n in range(TURNS):
                if (turn := f"{trajectory}.t{n}") in self.scheduler.cluster.turns:
                    self.forget(turn)
                    self.feed(ev.TurnEnded, turn=turn)
            self.feed(ev.TrajectoryEnded, trajectory=trajectory)

    def forget(self, turn: str) -> None:
        place = self.place.pop(turn, None)
        if place is not None:
            last = self.running.pop()
            if last != turn:
                self.running[place], self.place[last] = last, place


def measure(system: str, workers: int, events: int) -> dict[str, Any]:
    load = Load(scheduler(SYSTEMS[system]), workers)
    load.fill()
    load.run(events // 10)  # warm-up
    load.costs.clear()
    gc.collect()
    gc.disable()
    load.run(events)
    gc.enable()
    costs = np.concatenate([np.array(c) for c in load.costs.values()]) / 1e3
    row = {"system": system, "workers": workers, "turns": len(load.scheduler.cluster.turns)}
    row |= {"waiting": load.scheduler.waiting, "decisions": len(costs)}
    for name, percent in (("median", 50), ("p99", 99), ("p99.9", 99.9), ("max", 100)):
        row[f"{name}_us"] = np.percentile(costs, percent)
    for name, event in (("request", "TurnRequested"), ("end", "TurnEnded")):
        row[f"{name}_us"] = np.median(load.costs[event]) / 1e3
    return row


def main() -> None:
    args = flagged(__doc__, sizes="100,1000,10000", policies="", events=20_000, csv=Path)
    policies = listed("--policies", args.policies, SYSTEMS)
    sizes = [int(size) for size in args.sizes.split(",")]
    rows = [measure(system, size, args.events) for system in policies for size in sizes]
    show(rows, "one decision, by event: medians and percentiles")
    if args.csv:
        write_csv(args.csv, rows)


if __name__ == "__main__":
    main()
