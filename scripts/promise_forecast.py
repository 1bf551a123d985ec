"""What the simulator says of the sides of prove_promise.py before they run. Not a command.

One live run with one confined engine and the step log on is the profile, as in validate_sim.py;
its policy does not learn. The scheduler, the trainer's and the environment's seconds are then those
of that run, online requests those that all sides will get. The storm is in it at the times that it
keeps when no victim is late (rose/sim/faults.py), the requeue as a second start and half a step. A
step with a prompt may take several times as long as the simulator's, which is a mean, and the P99
of TTFT is made of these: it gets their measured spread, and a turn's way to an engine and back, on
top. Left out: what further processes take from each other on two cores, above all from the servers'
HTTP processes, for which online TTFT may come out several times later.
"""

from __future__ import annotations

import json
import math
import statistics
from dataclasses import replace
from pathlib import Path

import numpy as np
from harness import configured
from live_runs import Live, Ran
from promise_run import ALIKE, AWAY_S, DEVICES, GROUP, HOSTS, POLICIES, SIDES, STORM, Plan
from validate_sim import FREE_BYTES_S, Profile, profile_of

from rose import config as cfg
from rose.coordinator.coordinator import TICK_S
from rose.engine.rank import PROGRESS_S
from rose.files import write_whole
from rose.policies import build
from rose.sim import calibrate, faults, online, serving, spec
from rose.sim.driver import simulate
from rose.sim.result import Result

STEPS = 5  # of the profile, the first two uncounted
DEADLINE_S = 1200.0
SEEDS, DRAWS = 5, 50
STRIKES = 200  # of the storm: more than a run has time for
DEAD_S, HOST_S = 1.0, 5.0  # until a killed engine starts anew, until a killed host is there again
SLO_S = (2.0, 0.5)  # P99 of TTFT and TPOT, as bench_live.SLO


def forecast(plan: Plan) -> dict[str, dict[str, float]]:
    """By side; made once, kept in the proof's folder."""
    file = plan.folder / "forecast.json"
    if file.exists():
        return json.loads(file.read_text(encoding="utf-8"))
    ran, log = _profile_run(plan)
    c, profile = cfg.load(ran.run / "config.json"), profile_of([(ran, log)])
    late = _lateness(log.with_suffix(".whole"), profile.step)
    first = ran.steps(0)[0]
    start_s = first["time"] - first["time_step"] - (ran.run / "config.json").stat().st_mtime
    found = {side: _side(plan, side, c, profile, late, start_s) for side in SIDES}
    write_whole(file, json.dumps(found, indent=1).encode())
    return found


def _profile_run(plan: Plan) -> tuple[Ran, Path]:
    ran, log = Ran(plan.folder, "profile"), plan.folder / "profile.jsonl"
    if not ran.finished:
        log.unlink(missing_ok=True)
        words = ["fresh=true", "serving=none", "rollout.workers=1", f"trainer.steps={STEPS}"]
        words += [f"trainer.batch_size={plan.batch}", *plan.overrides]
        alike = [word for word in ALIKE if not word.startswith("trainer.optimizer.lr")]
        live = Live(plan.folder, "profile", [*alike, *words], plan.quota, log)
        live.wait(DEADLINE_S)
    return ran, log


def _side(
    plan: Plan, side: str, c: cfg.Config, profile: Profile, late: np.ndarray, start_s: float
) -> dict[str, float]:
    """Means over seeds."""
    found = []
    for seed in range(1, SEEDS + 1):
        what = _spec(plan, side, c, profile, seed, start_s)
        scheduler = build(configured(*POLICIES[side]).scheduler, c.rollout.turn_timeout_s)
        found.append(_figures(simulate(what, scheduler, seed), _alone(plan, what, seed, late)))
    mean = {key: float(np.mean([one[key] for one in found])) for key in found[0]}
    run_s = start_s + mean.pop("seconds")
    if side == "borrowed":
        run_s += start_s + mean["step_s"] / 2
    return mean | {"start_s": start_s, "held_s": run_s}


def _figures(ran: Result, alone: tuple[float, float]) -> dict[str, float]:
    """`alone`: P99 of TTFT and TPOT of devices that lend nothing; what lends is later by as much as
    the simulator says."""
    borrowed = [worker for worker in ran.workers if worker.kind != "dedicated"]
    made = sum(worker.decoded for worker in ran.workers)
    pairs = [(use.beside, use.alone) for use in ran.serving]
    ttft = max((a.ttft_p99_s / b.ttft_p99_s for a, b in pairs), default=1.0)
    tpot = max((a.tpot_p99_s / b.tpot_p99_s for a, b in pairs), default=1.0)
    return {
        "seconds": ran.seconds,
        "step_s": statistics.mean(step.seconds for step in ran.steps[1:]),
        "borrowed_share": sum(worker.decoded for worker in borrowed) / max(1, made),
        "ttft_p99_s": ttft * alone[0],
        "tpot_p99_s": tpot * alone[1],
    }


def _lateness(log: Path, step: spec.StepTime) -> np.ndarray:
    """How many times as long as the simulator's the steps with a prompt took."""
    found = []
    for line in log.read_text(encoding="utf-8").splitlines():
        ran = json.loads(line)
        if ran["prefill"]:
            new = sum(
                tokens * (step.c1 + step.c2 * (done + tokens / 2))
                for tokens, done in ran["prefill"]
            )
            rest = step.c3 * ran["decodes"] + step.c4 * ran["decode_context"] + step.c5
            found.append((ran["ended"] - ran["began"]) / (max(step.c0, new) + rest))
    return np.array(found)


def _alone(plan: Plan, what: spec.Spec, seed: int, late: np.ndarray) -> tuple[float, float]:
    """P99 of TTFT and TPOT of the devices' requests."""
    served = [online.serve(trace, _online(what.pools[0].engine)) for trace in plan.requests(seed)]
    draw = np.random.default_rng(seed)
    ttft = np.concatenate([one.ttft_s for one in served])
    way_s = what.dispatch_s + what.answer_s  # to an engine and back, here as in rollouts
    spread = way_s + ttft * draw.choice(late, (DRAWS, len(ttft)))
    tpot = np.concatenate([one.tpot_s for one in served])
    return float(np.quantile(spread, online.P99)), float(np.nanquantile(tpot, online.P99))


def _online(engine: spec.Engine) -> spec.Engine:
    return replace(engine, max_sequences=64, max_batched_tokens=2048)


def _spec(
    plan: Plan, side: str, c: cfg.Config, profile: Profile, seed: int, start_s: float
) -> spec.Spec:
    gpu = spec.Gpu("cpu", 1.0, 1.0, 1.0, "this machine's, by quota")
    engine = spec.Engine(
        profile.step,
        c.rollout.max_sequences,
        c.rollout.max_batched_tokens,
        profile.kv_tokens,
        c.rollout.prefix_caching,
    )
    way_s = max(0.0, profile.phases.sync_s - profile.pause_s)
    link = spec.Link(way_s, FREE_BYTES_S, 0.0, True, profile.pause_s, 0.0)
    at_once = spec.Allocation(0.0, 0.0)
    pools = [spec.Pool("rollout", "dedicated", gpu, 1, engine, link, at_once, SIDES[side])]
    struck: dict[str, list[float]] = {victim: [] for victim in STORM}
    if side == "borrowed":
        for number in range(STRIKES):
            struck[STORM[number % len(STORM)]].append((number + 1) * plan.every_s)
        starts = spec.Allocation(0.0, start_s)
        use = _serving(plan, engine, seed)
        for node, load in zip(DEVICES, use.devices.loads, strict=True):
            pool = spec.Pool(node, "cooperative", gpu, 1, engine, link, starts, 1)
            device = replace(use, devices=replace(use.devices, loads=(load,), devices=1))
            away = faults.up([(at, at + DEAD_S) for at in struck[node]])
            pools.append(replace(pool, serving=device, available=away))
        pool = spec.Pool("spare", "spot", gpu, 1, engine, link, starts, 1)
        away = faults.up([(at, at + AWAY_S) for at in struck["spare"]])
        pools.append(replace(pool, available=away))
    killed = [(at, HOSTS - 1) for at in struck["host"]]
    phases = profile.phases
    trainer = spec.Trainer(0, gpu, 1.0, 0.0, phases.step_s, 0.0, phases.token_s)
    return spec.Spec(
        side,
        plan.steps_of(side),
        spec.Batch(plan.batch // GROUP, GROUP, False),
        calibrate.Recorded(profile.groups, c.env.max_new_tokens),
        trainer,
        tuple(pools),
        TICK_S,
        PROGRESS_S,
        profile.dispatch_s,
        profile.answer_s,
        c.transfer.in_flight,
        sandboxes=faults.hosts(HOSTS, killed, "replay", 0.0, DEAD_S, HOST_S),
    )


def _serving(plan: Plan, engine: spec.Engine, seed: int) -> spec.Serving:
    s = configured().sim.serving
    beside = serving.Beside(_online(engine), s.pace * SLO_S[1], s.hold_s)
    loads = []
    for trace in plan.requests(seed):
        alone = serving.devices(trace, _online(engine), 1, 1, beside)
        loads += alone.loads
    found = serving.Devices(tuple(loads), len(DEVICES), (math.nan, math.nan))
    return spec.Serving(
        found, "gate", *SLO_S, s.overhead, s.contention, s.reserve, s.high_watermark, s.step
    )
