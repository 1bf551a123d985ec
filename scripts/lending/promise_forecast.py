"""Predict the sides of prove_promise.py by the simulator before they run. Not a command.

The profile is one live run with one confined engine and a step log, as in validate_sim.py; its
policy does not learn. Each side is simulated with its own policies and with the trainer's and the
environment's seconds of that run. Online requests are those that all sides will get. The storm
strikes at the times that it keeps when no victim is late (rose/parts/simulator/faults.py). The requeue counts
as a second start and half a step. Left out: compute that further processes take from each other on
two cores.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import replace
from pathlib import Path

import numpy as np

from rose import config as cfg
from rose.parts.simulator import faults, online, serving, spec
from rose.parts.simulator.driver import simulate
from rose.parts.simulator.result import Result
from rose.policies import build
from scripts.harness import configured, simulated
from scripts.lending.promise_count import SLACK
from scripts.lending.promise_run import (
    ALIKE,
    AWAY_S,
    DEVICES,
    ENGINES,
    GROUP,
    HOSTS,
    POLICIES,
    STORM,
    Plan,
)
from scripts.live_runs import Live, Ran
from scripts.simulator import validate_sim
from scripts.simulator.validate_sim import GPU, Profile, parts, profile_of

STEPS = 5  # steps of the profile, of which the first two don't count
DEADLINE_S = 1200.0
SEEDS = 5
STRIKES = 200  # strikes of the storm, more than a run has time for
# Seconds until a killed engine starts again, and until a killed host is back.
DEAD_S, HOST_S = 1.0, 5.0


def forecast(plan: Plan) -> dict[str, dict[str, float]]:
    """Return the means of each side over seeds."""
    ran, log = _profile_run(plan)
    c, profile = cfg.load(ran.run / "config.json"), profile_of([(ran, log)])
    first = ran.steps(0)[0]
    start_s = first["time"] - first["time_step"] - (ran.run / "config.json").stat().st_mtime
    return {side: _side(plan, side, c, profile, start_s) for side in ENGINES}


def _profile_run(plan: Plan) -> tuple[Ran, Path]:
    ran, log = Ran(plan.folder, "profile"), plan.folder / "profile.jsonl"
    if not ran.finished:
        log.unlink(missing_ok=True)
        words = ["fresh=true", "serving=none", "rollout.workers=1", f"trainer.steps={STEPS}"]
        words += [f"trainer.batch_size={plan.batch}", *plan.words]
        alike = [word for word in ALIKE if not word.startswith("trainer.optimizer.lr")]
        live = Live(plan.folder, "profile", [*alike, *words], plan.quota, log)
        live.wait(DEADLINE_S)
    return ran, log


def _side(
    plan: Plan, side: str, c: cfg.Config, profile: Profile, start_s: float
) -> dict[str, float]:
    """Return the means of a side over seeds."""
    found = []
    for seed in range(1, SEEDS + 1):
        what = _spec(plan, side, c, profile, seed, start_s)
        scheduler = build(configured(*POLICIES[side]).scheduler, c.rollout.turn_timeout_s)
        found.append(_figures(simulate(what, scheduler, seed)))
    mean = {key: float(np.mean([one[key] for one in found])) for key in found[0]}
    run_s = start_s + mean.pop("seconds")
    if side == "borrowed":
        run_s += start_s + mean["step_s"] / 2
    return mean | {"start_s": start_s, "held_s": run_s}


def _figures(ran: Result) -> dict[str, float]:
    borrowed = [worker for worker in ran.workers if worker.kind != "dedicated"]
    made = sum(worker.decoded for worker in ran.workers)
    pairs = [(use.beside, use.alone) for use in ran.serving]
    return {
        "seconds": ran.seconds,
        "step_s": statistics.mean(step.seconds for step in ran.steps[1:]),
        "borrowed_share": sum(worker.decoded for worker in borrowed) / max(1, made),
        "TTFT P99": max((a.ttft_p99_s / b.ttft_p99_s for a, b in pairs), default=1.0),
        "TPOT P99": max((a.tpot_p99_s / b.tpot_p99_s for a, b in pairs), default=1.0),
    }


def _targets(plan: Plan, engine: spec.Engine, seed: int) -> tuple[float, float]:
    """Return the targets of lending, P99 of TTFT and TPOT, as multiples of those of serving
    alone."""
    served = [online.serve(trace, _online(engine)) for trace in plan.requests(seed)]
    latencies = ([one.ttft_s for one in served], [one.tpot_s for one in served])
    ttft, tpot = (float(np.nanquantile(np.concatenate(one), online.P99)) for one in latencies)
    return SLACK * ttft, SLACK * tpot


def _online(engine: spec.Engine) -> spec.Engine:
    return replace(engine, max_sequences=64, max_batched_tokens=2048)


def _spec(
    plan: Plan, side: str, c: cfg.Config, profile: Profile, seed: int, start_s: float
) -> spec.Spec:
    engine, link, _ = parts(c, profile)
    at_once = spec.Allocation(0.0, 0.0)
    pools = [spec.Pool("rollout", "dedicated", GPU, 1, engine, link, at_once, ENGINES[side])]
    struck: dict[str, list[float]] = {victim: [] for victim in STORM}
    if side == "borrowed":
        for number in range(STRIKES):
            struck[STORM[number % len(STORM)]].append((number + 1) * plan.every)
        starts = spec.Allocation(0.0, start_s)
        use = _serving(plan, engine, seed)
        for node, load in zip(DEVICES, use.devices.loads, strict=True):
            pool = spec.Pool(node, "cooperative", GPU, 1, engine, link, starts, 1)
            device = replace(use, devices=replace(use.devices, loads=(load,), devices=1))
            away = faults.up([(at, at + DEAD_S) for at in struck[node]])
            pools.append(replace(pool, serving=device, available=away))
        pool = spec.Pool("spare", "spot", GPU, 1, engine, link, starts, 1)
        away = faults.up([(at, at + AWAY_S) for at in struck["spare"]])
        pools.append(replace(pool, available=away))
    killed = [(at, HOSTS - 1) for at in struck["host"]]
    hosts = faults.hosts(HOSTS, killed, "replay", 0.0, DEAD_S, HOST_S)
    batch = spec.Batch(plan.batch // GROUP, GROUP, False)
    return validate_sim.simulated(c, profile, side, plan.steps_of(side), batch, pools, hosts)


def _serving(plan: Plan, engine: spec.Engine, seed: int) -> spec.Serving:
    s = simulated().sim.serving
    targets = _targets(plan, engine, seed)
    beside = serving.Beside(_online(engine), s.pace * targets[1], s.hold_s)
    loads = []
    for trace in plan.requests(seed):
        alone = serving.devices(trace, _online(engine), 1, 1, beside)
        loads += alone.loads
    found = serving.Devices(tuple(loads), len(DEVICES), (math.nan, math.nan))
    return spec.Serving(
        found, "gate", *targets, s.overhead, s.contention, s.reserve, s.high_watermark, s.step
    )
