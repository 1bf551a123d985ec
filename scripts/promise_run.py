"""One run of prove_promise.py, from its submission to its figures. Not a command.

Both sides have the same serving jobs, users and trainer. `dedicated` has four dedicated engines and
lends nothing; `borrowed` has one, takes what the serving devices leave idle and a spare engine, and
is harmed all the while (`Storm`).
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import promise_count
import psutil
from bench_live import SERVED, SLO, users
from harness import REPOSITORY
from live_runs import LOOK_S
from promise_cluster import Serving, Training, command

from rose import config as cfg
from rose.protocol import Role
from rose.sim import traces

SIDES = {"dedicated": 4, "borrowed": 1}  # dedicated engines
POLICIES = {
    "dedicated": ("scheduler/provisioning=fixed", "scheduler/routing=cache_affine"),
    "borrowed": ("scheduler/provisioning=rose", "scheduler/routing=rose"),
}
HOST = "rose.agent.process"  # an environment host's own process, below its rank
DEVICES, SPARE = ("n3", "n4"), "n5"  # nodes that serve users, and a spare one; training has n1, n2
START_S, STEP_S = 600.0, 600.0  # deadlines: of all that starts, and of a training step
PROMPT, OUTPUT = (64.0, 0.6), (24.0, 0.6)  # tokens of the made trace: median, sigma
MOST_PROMPT, MOST_OUTPUT = 300, 100
TRACE_S = 3600.0
MODEL = ("+model.recipe.env=terminal", "+model.recipe.noise=0.5", "+model.recipe.steps=480")
MODEL += ("+model.recipe.layers=4",)
GROUP = 8
ALIKE = (
    *MODEL,
    "env=agent",
    f"env.args.function={REPOSITORY}/scripts/promise_agent.py:play",
    "env.max_turns=3",
    "env.max_new_tokens=24",
    f"rollout.group_size={GROUP}",
    "rollout.max_sequences=8",  # an engine's memory bounds what it can do at once
    "rollout.kv_cache_gib=0.05",
    "rollout.threads=1",
    "trainer.threads=1",
    "trainer.optimizer.lr=1e-3",
    "eval.episodes=0",
    "observe.terminal=false",
    "observe.tensorboard=false",
    "transfer.keep_versions=4",
    "serving.lost_after_s=10",  # a busy machine: a rank may be late by seconds
)
ONLINE = (
    f"serving.online.served_name={SERVED}",
    "serving.online.port=0",
    "serving.online.dtype=float32",
    "serving.online.kv_cache_gib=0.1",
    "serving.online.max_context=512",
    "rollout.kv_cache_gib=0.1",
    f"serving.online.slo={SLO}",
)


@dataclass
class Plan:
    """What the runs of a proof have in common."""

    folder: Path
    model: Path  # that the online servers serve: the policy's first weights
    profile: Path  # of a serving device
    steps: int
    batch: int
    quota: float  # cores of an engine, and of a serving device
    rate: float  # online requests per second and device
    trace: Path | None
    every_s: float  # between two kills
    kill_hosts: bool
    overrides: list[str] = field(default_factory=list)

    def requests(self, seed: int) -> list[traces.Trace]:
        """Of each device; the same on both sides."""
        if self.trace is None:
            seeds = [1000 * seed + number for number in range(len(DEVICES))]
            made = [
                traces.generate(one, TRACE_S, self.rate, prompt=PROMPT, output=OUTPUT)
                for one in seeds
            ]
            return [trace.clipped(MOST_PROMPT, MOST_OUTPUT) for trace in made]
        whole = traces.read(self.trace)
        lengths = whole.tokens_scaled(
            PROMPT[0] / whole.prompt_tokens.mean(), OUTPUT[0] / whole.output_tokens.mean()
        ).clipped(MOST_PROMPT, MOST_OUTPUT)
        slower = lengths.scaled(len(whole) / whole.seconds / (self.rate * len(DEVICES)))
        begin = (seed * TRACE_S / 3) % max(1.0, slower.seconds - TRACE_S)
        part = slower.slice(begin, TRACE_S)
        return [part.part(slice(at, None, len(DEVICES))) for at in range(len(DEVICES))]


@dataclass
class Storm:
    """What befalls the borrowed side: every `every_s` seconds the next of the borrowed engines is
    killed or preempted, or an environment host is killed; at half of the steps the whole job is
    requeued. Each in the midst of rollouts."""

    plan: Plan
    training: Training
    lent: list[Serving]
    spare: Serving
    log: Callable[[str], None]
    done: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._turns = self._order()
        self._next = next(self._turns)
        self._due = time.monotonic() + self.plan.every_s
        self._requeued = False

    def _order(self) -> Iterator[Callable[[], str]]:
        while True:
            yield self.lent[0].kill
            yield self.spare.preempt
            yield self.lent[1].kill
            if self.plan.kill_hosts:
                yield self._kill_host

    def look(self) -> None:
        steps, amid = len(self.training.steps()), self.training.amid()
        if amid and not self._requeued and steps >= self.plan.steps // 2:
            self._requeued = True
            command("scontrol", "requeue", self.training.id)
            self._note(f"requeued the training job after step {steps}")
            return
        if amid and time.monotonic() >= self._due and (what := self._next()):
            self._note(what)
            self._next = next(self._turns)
            self._due = time.monotonic() + self.plan.every_s

    def _kill_host(self) -> str:
        """SIGKILL to the process that has the agents."""
        for rank in self.training.ranks(Role.ENVIRONMENT)[-1:]:
            with contextlib.suppress(psutil.NoSuchProcess):
                for process in psutil.Process(rank.pid).children():
                    if HOST in process.cmdline():
                        process.kill()
                        return f"killed environment host {rank.index}"
        return ""

    def _note(self, what: str) -> None:
        self.done.append(what)
        self.log(what)


async def run(plan: Plan, side: str, seed: int, log: Callable[[str], None]) -> dict:
    """Of one side and seed: its figures. Raises `SystemExit` naming a log when something did not
    come in time."""
    name, borrows = f"{side}-{seed}", side == "borrowed"
    online = [f"serving.online.model={plan.model}", *ONLINE]
    if borrows:
        online.append(f"serving.lending.profile={plan.profile}")
    jobs: list[Serving] = []
    clients: list[asyncio.Task] = []
    training, over = None, asyncio.Event()
    try:
        jobs += [Serving(plan.folder, name, node, plan.quota, online) for node in DEVICES]
        await _until(lambda: all(job.url for job in jobs), "the online servers", jobs)
        for job in jobs if borrows else ():
            if job.lends_nothing:
                raise SystemExit(f"{job.log}: nothing is lent: {job.lends_nothing}")
        log("the online servers serve")
        began = time.time()
        training = Training(plan.folder, name, _overrides(plan, side, seed), plan.quota)
        if borrows:
            jobs.append(Serving(plan.folder, name, SPARE, plan.quota, ()))
        await _until(lambda: training.phase == "rollout", "the first step", jobs, training)
        log(f"the first step has begun, {time.time() - began:.0f} s after the submission")
        words = cfg.read_shape(plan.model).vocab
        clients += [
            asyncio.create_task(users(job.url, trace, seed, over, words))
            for job, trace in zip(jobs, plan.requests(seed), strict=False)
        ]
        storm = Storm(plan, training, jobs[:2], jobs[2], log) if borrows else None
        await _train(plan, training, jobs, storm, log)
        over.set()
        served = [request for found in await asyncio.gather(*clients) for request in found]
        return _figures(plan, training, side, seed, storm.done if storm else []) | {
            "requests": len(served),
            "answered": sum(request.done for request in served),
            "ttft_s": [request.ttft for request in served if request.done],
            "tpot_s": [request.tpot for request in served if request.tpot is not None],
        }
    finally:
        for client in clients:
            client.cancel()
        for one in filter(None, (training, *jobs)):
            one.close()


def _overrides(plan: Plan, side: str, seed: int) -> list[str]:
    return [
        *ALIKE,
        f"trainer.steps={plan.steps}",
        f"trainer.batch_size={plan.batch}",
        f"seed={seed}",
        f"rollout.workers={SIDES[side]}",
        "cluster.slurm.rollout.nodes=1",
        "cluster.slurm.trainer.sbatch=['--nodelist=n1']",
        "cluster.slurm.rollout.sbatch=['--nodelist=n2']",
        f"rollout.environment_hosts={2 if plan.kill_hosts else 1}",
        "trainer.checkpoint_every=1",
        *POLICIES[side],
        *(() if side == "borrowed" else ("serving=none",)),
        *plan.overrides,
    ]


async def _until(
    ready: Callable[[], object], what: str, jobs: list[Serving], training: Training | None = None
) -> None:
    end = time.monotonic() + START_S
    while not ready():
        _look(jobs, training)
        over = next((job for job in (*jobs, training) if job and not job.active), None)
        if over or time.monotonic() > end:
            raise SystemExit(
                f"{what} did not come within {START_S:g} s; see {over.log if over else jobs[0].log}"
                + (f" and {training.run}/logs" if training else "")
            )
        await asyncio.sleep(LOOK_S)


def _look(jobs: list[Serving], training: Training | None) -> None:
    for one in filter(None, (training, *jobs)):
        one.confine()


async def _train(
    plan: Plan,
    training: Training,
    jobs: list[Serving],
    storm: Storm | None,
    log: Callable[[str], None],
) -> None:
    """To the end of the run's last step, in order."""
    known, end = 0, time.monotonic() + STEP_S
    while True:
        _look(jobs, training)
        if not training.active:
            break
        rows = training.steps()
        if len(rows) > known:
            known, end = len(rows), time.monotonic() + STEP_S
            row = rows[-1]
            log(
                f"step {row['step']} of {plan.steps}: reward {row['reward_mean']:.2f}, "
                f"{row['time_step']:.1f} s, {row.get('borrowed_workers', 0)} borrowed"
            )
        if time.monotonic() > end:
            raise SystemExit(f"no step within {STEP_S:g} s; see {training.run}/logs")
        if storm is not None and known < plan.steps:
            storm.look()
        await asyncio.sleep(LOOK_S)
    if not (training.run / "status" / "finished.json").exists():
        raise SystemExit(f"the training job ended early; see {training.run}/logs")


def _figures(plan: Plan, training: Training, side: str, seed: int, harm: list[str]) -> dict:
    rows = training.steps()
    return {
        "side": side,
        "seed": seed,
        "engines": SIDES[side],
        "held_s": training.held_s(),
        "attempts": len(list((training.run / "journal").glob("attempt-*.jsonl"))),
        "rewards": [row["reward_mean"] for row in rows],
        "step_s": [row["time_step"] for row in rows],
        "borrowed_share": [row.get("borrowed_token_share", 0.0) for row in rows],
        "resumed_turns": sum(row.get("resumed_turns", 0) for row in rows),
        "migrations": sum(row.get("migrations", 0) for row in rows),
        "harm": harm,
        "counts": promise_count.count(training.run, plan.steps, plan.batch)._asdict(),
    }
