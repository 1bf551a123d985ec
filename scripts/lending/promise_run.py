"""Run one side of prove_promise.py, from the submission to the figures. Not a command.

All sides have the same serving jobs, users and trainer. `dedicated` has four dedicated engines and
`alone` one, and nothing is lent. `borrowed` has one dedicated engine, uses the compute that the
serving devices leave idle and a spare engine, and is harmed throughout (`Storm`).
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import re
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import psutil

from rose import config as cfg
from rose.coordinator.replay import load
from rose.parts.simulator import traces
from rose.protocol import Role
from scripts import live_runs
from scripts.harness import REPOSITORY, each_thread
from scripts.lending import promise_count
from scripts.lending.bench_coserving_client import replay
from scripts.lending.promise_count import targets
from scripts.live_runs import FAVOURED, LOOK_S, Quota, Stolen
from scripts.runs import MEASURED
from scripts.slurm_jobs import Serving, Training, command

SERVED = "chat"
ENGINES = {"dedicated": 4, "alone": 1, "borrowed": 1}  # dedicated engines of each side
POLICIES = {
    "dedicated": ("scheduler/provisioning=fixed", "scheduler/routing=cache_affine"),
    "alone": ("scheduler/provisioning=fixed", "scheduler/routing=cache_affine"),
    "borrowed": ("scheduler/provisioning=rose", "scheduler/routing=rose"),
}
HOST = "rose.agent.process"  # an environment host's own process, below its rank
HOSTS = 2
REPEATED = ("trajectories_restarted", "resumed_turns")  # counters in metrics.jsonl
DEVICES, SPARE = ("n3", "n4"), "n5"  # nodes that serve users, and a spare one; training has n1, n2
# Seconds of a piece of the users' traffic, and seconds for the answers after its end.
PIECE_S, DRAIN_S = 5.0, 20.0
SWITCH_S = 0.001  # seconds after which a thread hands Python's lock on to the users' clients
WAIT_S = 600.0  # deadline of all starts, and of a training step
PROMPT, OUTPUT = 64.0, 24.0  # mean tokens of the users' requests
MOST_PROMPT, MOST_OUTPUT = 300, 100
STORM = ("n3", "spare", "host", "n4")  # borrowed engines by node, an environment host
# Seconds until a missing victim is skipped; seconds of the more urgent job on the spare device.
VICTIM_S, AWAY_S = 20.0, 30.0
TRACE_S = 1200.0  # seconds of the users' traffic
SOON_S, BURST_S = 240.0, 20.0  # seconds that each run lasts at least; seconds of a burst
CALLS = 3  # the most calls of an episode, as in promise_agent.py
MODEL = ("+model.recipe.env=terminal", "+model.recipe.noise=0.5", "+model.recipe.steps=480")
MODEL += ("+model.recipe.layers=4",)
GROUP = 4
ALIKE = (
    *MODEL,
    "env=agent",
    f"env.args.function={REPOSITORY}/scripts/lending/promise_agent.py:play",
    f"env.max_turns={CALLS}",
    "env.max_new_tokens=24",
    f"rollout.group_size={GROUP}",
    "rollout.max_sequences=6",  # bound by an engine's memory
    "rollout.kv_cache_gib=0.05",
    *MEASURED,
    "observe.report=true",
    "trainer.optimizer.lr=5e-4",  # At 1e-3 one of six runs forgot its calls for good.
    "trainer.optimizer.schedule=constant",  # sides differ in their number of steps
    "trainer.optimizer.warmup_steps=2",
    "transfer.keep_versions=4",
    "serving.lost_after_s=10",  # busy machine, on which a rank may be seconds late
)
ONLINE = (
    f"serving.online.served_name={SERVED}",
    "serving.online.port=0",
    "serving.online.dtype=float32",
    "serving.online.kv_cache_gib=0.1",
    "serving.online.max_context=512",
    "rollout.kv_cache_gib=0.1",
)


@dataclass
class Plan:
    """The settings that all runs of a proof share."""

    folder: Path
    model: Path  # model of the online servers, the policy's first weights
    profile: Path  # profile of a serving device
    steps: int
    batch: int
    quota: float  # cores of an engine, and of a serving device
    rate: float  # online requests per second and device
    trace: Path
    every: float  # seconds between two kills
    words: list[str] = field(default_factory=list)  # overrides of the run's configuration

    def requests(self, seed: int) -> list[traces.Trace]:
        """Return the requests of each device, the same on all sides."""
        whole = traces.read(self.trace)
        lengths = whole.tokens_scaled(
            PROMPT / whole.prompt_tokens.mean(), OUTPUT / whole.output_tokens.mean()
        ).clipped(MOST_PROMPT, MOST_OUTPUT)
        # The trace's seconds are stretched to reach `rate`.
        slower = lengths.scaled(len(whole) / whole.seconds / (self.rate * len(DEVICES)))
        count = int(slower.seconds // TRACE_S)
        windows = [slower.slice(TRACE_S * at, TRACE_S) for at in range(count)]
        windows.sort(key=_fullest, reverse=True)
        chosen = windows[(seed - 1) % len(windows)]
        return [chosen.part(slice(at, None, len(DEVICES))) for at in range(len(DEVICES))]

    def steps_of(self, side: str) -> int:
        """Return the steps of a side. `alone` has fewer, because one engine is slow and nothing is
        claimed of its reward. Latencies are compared over the traffic that both sides had."""
        return 2 * self.steps // 5 if side == "alone" else self.steps


def _fullest(window: traces.Trace) -> int:
    """Return the requests of the window's largest burst within the least time of a run."""
    soon = window.at[window.at < SOON_S]
    return int(np.bincount((soon / BURST_S).astype(np.int64), minlength=1).max())


@dataclass
class Storm:
    """The harm to the borrowed side, always amid rollouts:

    1. Every `every` seconds the next victim of `STORM` is struck. It is skipped if it isn't there
       for `VICTIM_S`.
    2. At half of the steps the whole job is requeued.
    """

    plan: Plan
    training: Training
    lent: list[Serving]
    spare: Serving
    log: Callable[[str], None]
    began: float  # wall-clock time at which the training job was submitted
    done: list[tuple[float, str]] = field(default_factory=list)  # (seconds since then, harm done)
    _number: int = 0
    _missing_since: float = math.inf
    _requeued: bool = False

    def __post_init__(self) -> None:
        self._due = time.monotonic() + self.plan.every

    def look(self) -> None:
        steps, amid, now = len(self.training.steps()), self.training.amid(), time.monotonic()
        if amid and not self._requeued and steps >= self.plan.steps // 2:
            self._requeued, self._due = True, max(self._due, now + VICTIM_S)  # no strikes meanwhile
            command("scontrol", "requeue", self.training.id)
            self._note(f"requeued the training job after step {steps}")
        elif amid and now >= self._due:
            victim = STORM[self._number % len(STORM)]
            if what := self._strike(victim):
                self._note(what)
            else:
                self._missing_since = min(self._missing_since, now)
                if now < self._missing_since + VICTIM_S:
                    return
                self.log(f"skipped {victim}: not there")
            self._number, self._missing_since = self._number + 1, math.inf
            self._due = now + self.plan.every

    def _strike(self, victim: str) -> str:
        """Strike the victim. Return what was done, '' if it isn't there."""
        if victim == "host":
            return self._kill_host()
        if victim == "spare":
            return self.spare.preempt(AWAY_S)
        return self.lent[DEVICES.index(victim)].kill()

    def _kill_host(self) -> str:
        """Kill the process that runs the agents. Return what was done, '' if it isn't there."""
        for rank in self.training.ranks(Role.ENVIRONMENT)[-1:]:
            with contextlib.suppress(psutil.NoSuchProcess):
                for process in psutil.Process(rank.pid).children():
                    if HOST in process.cmdline():
                        process.kill()
                        return f"killed environment host {rank.index}"
        return ""

    def _note(self, what: str) -> None:
        self.done.append((time.time() - self.began, what))
        self.log(what)


async def run(
    plan: Plan, side: str, seed: int, alone: dict | None, log: Callable[[str], None]
) -> dict:
    """Run one side of one seed and return its figures. `alone`: the figures of serving alone under
    the same traffic, which set the targets of lending. Raises `SystemExit` naming a log when a
    start or a step exceeds its deadline."""
    name, borrows = f"{side}-{seed}", side == "borrowed"
    online = [f"serving.online.model={plan.model}", *ONLINE]
    slo = targets(alone) if alone is not None else {}
    if borrows:
        words = ", ".join(f"{key}: {value:g}" for key, value in slo.items())
        online += [f"serving.lending.profile={plan.profile}", f"serving.online.slo={{{words}}}"]
    jobs: list[Serving] = []
    clients: list[asyncio.Task] = []
    training, over, before, load = None, asyncio.Event(), Stolen.now(), os.getloadavg()[0]
    started = time.monotonic()
    try:
        jobs += [
            Serving(plan.folder, name, node, plan.quota, online, core(number))
            for number, node in enumerate(DEVICES)
        ]
        await _until(lambda: all(job.url for job in jobs), "the online servers", jobs)
        for job in jobs if borrows else ():
            if job.lends_nothing:
                raise SystemExit(f"{job.log}: nothing is lent: {job.lends_nothing}")
        log("the online servers serve")
        began = time.time()
        training = Training(plan.folder, name, _overrides(plan, side, seed), plan.quota)
        if borrows:
            jobs.append(Serving(plan.folder, name, SPARE, plan.quota, ()))
        await _until(lambda: training.phase()[0] == "rollout", "the first step", jobs, training)
        log(f"the first step has begun, {time.time() - began:.0f} s after the submission")
        words = cfg.read_shape(plan.model).vocab
        _set_nice(FAVOURED)
        clients += [
            asyncio.create_task(users(job.url, trace, seed, over, words))
            for job, trace in zip(jobs, plan.requests(seed), strict=False)
        ]
        traffic = time.monotonic()
        storm = Storm(plan, training, jobs[:2], jobs[2], log, began) if borrows else None
        await _train(plan.steps_of(side), training, jobs, storm, log)
        over.set()
        served_s = time.monotonic() - traffic
        served = [request for found in await asyncio.gather(*clients) for request in found]
        return _figures(plan, training, side, seed, began) | {
            "harm": storm.done if storm else [],
            "targets": slo,
            "load": load,
            "stolen": Stolen.now().share_since(before),
            "served_s": served_s,
            "requests": sorted(served),
            "whole_s": time.monotonic() - started,
        }
    finally:
        for client in clients:
            client.cancel()
        for one in filter(None, (training, *jobs)):
            one.close()
        _set_nice(0)


def _set_nice(value: int) -> None:
    """Set the nice value of this process, which has the users' clients, and let them run soon."""
    sys.setswitchinterval(SWITCH_S)
    each_thread(psutil.Process(), lambda it: os.setpriority(os.PRIO_PROCESS, it, value))


async def _apart(work: Callable[[], Any]) -> Any:
    """Return the result of `work`, which runs in another thread and without the clients' priority,
    as do the commands that it starts."""

    def run() -> Any:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 0)
        return work()

    return await asyncio.to_thread(run)


def machine() -> str:
    """Return this machine's cores and their kind."""
    kinds = re.findall(r"model name\s*: (.+)", Path("/proc/cpuinfo").read_text(encoding="utf-8"))
    return f"{os.cpu_count()} cores, {kinds[0] if kinds else 'of an unknown kind'}"


def core(device: int) -> int:
    """Return the core on which both engines of a serving device run."""
    cores = sorted(os.sched_getaffinity(0))
    return cores[device % len(cores)]


def profile(plan: Plan, seconds: float) -> None:
    """Measure a serving device, for `seconds` each engine and both together."""
    models = (f"model={plan.model}", f"serving.online.model={plan.model}", "model.max_context=512")
    with contextlib.closing(Quota("profile", plan.quota, core(0))) as quota:
        words = (f"seconds={seconds}", *models, "rollout.threads=1", *ONLINE)
        live_runs.profile(plan.profile, quota, words)


async def users(
    url: str, trace: traces.Trace, seed: int, over: asyncio.Event, words: int
) -> list[tuple[float, float | None, float | None, bool]]:
    """Send each request at its time until `over` is set. Return for each its time, its TTFT, its
    TPOT, and whether it was answered within `DRAIN_S`."""
    start, pieces, at = time.monotonic(), [], 0.0
    while not over.is_set() and at < trace.seconds:
        piece, key = trace.slice(at, PIECE_S), 10_000 * seed + int(at)
        asked = replay(url, SERVED, piece, key, DRAIN_S, start=start + at, words=words)
        pieces.append((at, asyncio.create_task(asked)))
        at += PIECE_S
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(over.wait(), max(0.0, start + at - time.monotonic()))
    end = time.monotonic() - start
    return [
        (at + one.at, one.ttft, one.tpot, one.done)
        for at, piece in pieces
        for one in await piece
        if at + one.at < end
    ]


def _overrides(plan: Plan, side: str, seed: int) -> list[str]:
    return [
        *ALIKE,
        f"trainer.steps={plan.steps_of(side)}",
        f"trainer.batch_size={plan.batch}",
        f"seed={seed}",
        f"rollout.workers={ENGINES[side]}",
        "cluster.slurm.rollout.nodes=1",
        "cluster.slurm.trainer.sbatch=['--nodelist=n1']",
        "cluster.slurm.rollout.sbatch=['--nodelist=n2']",
        f"rollout.environment_hosts={HOSTS}",
        "trainer.checkpoint_every=1",
        *POLICIES[side],
        *(() if side == "borrowed" else ("serving=none",)),
        *plan.words,
    ]


async def _until(
    ready: Callable[[], object],
    what: str,
    jobs: list[Serving],
    training: Training | None = None,
    storm: Storm | None = None,
) -> None:
    """Confine engines and run the storm until `ready()`. Raises `SystemExit` after `WAIT_S`, or if
    the training job, or before there is one a serving job, has ended.

    Scans of all processes and Slurm's commands take long, so they run in other threads. The event
    loop has the users' clients, which would see tokens that much later.
    """
    end = time.monotonic() + WAIT_S

    def confined() -> bool:
        """Confine engines. Returns True if a job that should run is over."""
        for one in filter(None, (training, *jobs)):
            one.confine()
        return any(job.over for job in ([training] if training else jobs))

    while not await _apart(ready):
        over = await _apart(confined)
        if over and await _apart(ready):  # The job may have ended since the last look.
            return
        if over or time.monotonic() > end:
            why = "since the job has ended" if over else f"within {WAIT_S:g} s"
            where = f" and {training.run}/logs" if training else ""
            raise SystemExit(f"{what} did not come {why}; see {jobs[0].log}{where}")
        if storm is not None:
            await _apart(storm.look)
        await asyncio.sleep(LOOK_S)


async def _train(
    steps: int,
    training: Training,
    jobs: list[Serving],
    storm: Storm | None,
    log: Callable[[str], None],
) -> None:
    """Watch the run until it ends, and log its steps. Raises as `_until` does."""
    for step in range(1, steps + 1):
        await _until(lambda: len(training.steps()) >= step, f"step {step}", jobs, training, storm)
        row = training.steps()[-1]
        log(
            f"step {row['step']} of {steps}: reward {row['reward_mean']:.2f}, "
            f"{row['time_step']:.1f} s, {row.get('borrowed_workers', 0)} borrowed"
        )
    finished = training.run / "status" / "finished.json"
    await _until(lambda: finished.exists() and training.over, "the end of the run", jobs, training)


def _figures(plan: Plan, training: Training, side: str, seed: int, began: float) -> dict:
    rows, steps = training.steps(), plan.steps_of(side)
    trained = [load(training.run, step) for step in range(1, steps + 1)]
    return {
        "machine": machine(),
        "side": side,
        "seed": seed,
        "engines": ENGINES[side],
        "held": [[start - began, end - began] for start, end in training.held()],
        "attempts": len(list((training.run / "journal").glob("attempt-*.jsonl"))),
        "at_s": [row["time"] - began for row in rows],
        "groups": [[fmean(t.reward for t in group) for group in step] for step in trained],
        "step_s": [row["time_step"] for row in rows],
        "borrowed_share": [row.get("borrowed_token_share", 0.0) for row in rows],
        "repeated": {key: sum(row.get(key, 0) for row in rows) for key in REPEATED},
        "counts": promise_count.count(training.run, steps, plan.batch)._asdict(),
    }
