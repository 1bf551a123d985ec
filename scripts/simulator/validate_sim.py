"""Compare the simulator's predictions with live runs on this machine: step time, tail, utilisation.

    python scripts/simulator/validate_sim.py                                # all configurations twice, some 25 minutes
    python scripts/simulator/validate_sim.py --only sync_2 dapo_2 --rounds 1 # a quick run
    python scripts/simulator/validate_sim.py --quota 0.4 --csv docs/results/validate_sim.csv

The profile is two live runs with one engine, one with much and one with little to do. From them
come the engine's step time, the episodes (turns, tokens, tool times), the seconds of the trainer
and of the synchronisation, and the delays from the coordinator to an engine and back. Then every
configuration runs live and is simulated with those numbers, of which none is fitted. Each engine
has the same CPU quota (live_runs.py), and the policy does not learn, so that all runs have the same
lengths. Compared are medians over the steps of all rounds, without the first: a step's seconds;
their tail (95th percentile from a group's admission to a trajectory's end); and the share of a step
in which a dedicated engine had a turn.

The figures need a machine without other load: --quota times engines, the trainer's thread and the
environment host must find a core whenever they need one. Only steps count in which the hypervisor
took less than 5% of the machine, and a configuration with too few of them runs again in the next
round, --rounds at most. Finished runs that are in --keep FOLDER are used again.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from rose import config as cfg
from rose.coordinator import replay
from rose.coordinator.records import TICK_S
from rose.engine.rank import PROGRESS_S
from rose.observe.recorder import read_events
from rose.parts.simulator import calibrate, spec
from rose.parts.simulator.driver import simulate
from rose.policies import build
from rose.scheduler import events as ev
from scripts.csv_tables import show, write_csv
from scripts.harness import Failed, flagged
from scripts.live_runs import Durations, Live, Ran, end_in_order, wait_for_calm

PROFILES = {
    "profile": "rollout.workers=1 trainer.batch_size=48 scheduler/routing=cache_affine",
    "profile_low": "rollout.workers=1 trainer.batch_size=8 scheduler/routing=cache_affine",
}
LIVE = {
    "sync_2": "rollout.workers=2 trainer.batch_size=64 scheduler/routing=cache_affine",
    "sync_1_low": "rollout.workers=1 trainer.batch_size=16 scheduler/routing=least_loaded",
    "round_robin_2_queued": "rollout.workers=2 trainer.batch_size=64 "
    "scheduler/routing=round_robin rollout.max_sequences=8",
    "dapo_2": "rollout.workers=2 trainer.batch_size=32 scheduler/batching=dapo",
    "tail_batching_1": "rollout.workers=1 trainer.batch_size=32 scheduler/batching=tail_batching",
    "seer_2": "rollout.workers=2 trainer.batch_size=48 scheduler/routing=seer "
    "scheduler/order=longest_first",
    "one_step_off_1": "rollout.workers=1 trainer.batch_size=32 scheduler/batching=one_step_off",
    "areal_2": "rollout.workers=2 trainer.batch_size=64 scheduler/batching=bounded_staleness "
    "scheduler.batching.args.eta=1",
}
ENOUGH = 6  # least number of training steps that count
SKIP = 2  # first steps that don't count
IDLE_S = 0.002  # seconds between two steps, above which the engine had nothing to do
MOST_GAP_S = 0.1  # seconds between steps of a busy engine; a larger gap is no overhead
DEADLINE_S = 1800.0
FREE_BYTES_S = 1e12  # bytes/s so high that a version's way is all latency, as it was measured
SEEDS = 5  # seeds of each prediction
GPU = spec.Gpu("cpu", 1.0, 1.0, 1.0, "this machine's, by quota")


class Figures(NamedTuple):
    step: float
    tail: float
    utilisation: float


class Profile(NamedTuple):
    """The measured values that a simulation needs beyond the configuration."""

    step: spec.StepTime
    error: float  # error of its fit
    groups: list[list[spec.Episode]]
    phases: calibrate.Phases
    dispatch_s: float
    answer_s: float
    pause_s: float
    kv_tokens: int


# --------------------------------------------------------------------------- profile


class Window(NamedTuple):
    """A training step, in wall-clock times."""

    begin: float
    end: float


def profile_of(runs: list[tuple[Ran, Path]]) -> Profile:
    """Return the profile from live runs with their step logs."""
    logs, groups, rows, pauses = [], [], [], []
    there: list[float] = []
    back: list[float] = []
    for live, log in runs:
        entries = live.entries()
        saved = {row["step"]: replay.load(live.run, row["step"]) for row in live.steps(0)}
        rewards = {t.id: t.reward for step in saved.values() for group in step for t in group}
        [journal] = (live.run / "journal").glob("attempt-*.jsonl")
        groups += calibrate.of_journal(journal, rewards)
        counted = live.calm_steps(SKIP)
        rows += [
            row | {"tokens": sum(len(t.mask) for group in saved[row["step"]] for t in group)}
            for row in counted
        ]
        windows = [Window(row["time"] - row["time_step"], row["time"]) for row in counted]
        steps = engine_steps(log)
        logs.append(log.with_suffix(".whole"))
        between_included(steps, windows, logs[-1])
        to, fro = ways(live, entries, steps, windows)
        there, back = there + to, back + fro
        pauses += [row["sync_pause_s"] for row in counted]
        joined = next(event for event, _ in entries if isinstance(event, ev.WorkerJoined))
    phases = logs[0].with_name("phases.jsonl")
    lines = (json.dumps(row | {"step": at}) + "\n" for at, row in enumerate(rows))
    phases.write_text("".join(lines), encoding="utf-8")
    step, error = calibrate.of_steps(logs)
    delays = statistics.median(there), statistics.median(back), statistics.mean(pauses)
    found = calibrate.of_metrics(phases, skip=0)
    return Profile(step, error, groups, found, *delays, joined.kv_tokens)


def engine_steps(log: Path) -> list[dict]:
    """Return the engine's steps of a log, each with its `start` by the clock of `wall`."""
    steps = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    return [step | {"start": step["wall"] - (step["ended"] - step["began"])} for step in steps]


def between_included(steps: list[dict], windows: list[Window], out: Path) -> None:
    """Write a log of the windows' steps that includes the time between steps. A step with decodes
    begins where the one before ended: its requests were there already, so the time between was the
    engine's own work. Other steps get the median of that time."""
    gaps = [b["began"] - a["ended"] for a, b in zip(steps, steps[1:], strict=False) if b["decodes"]]
    usual = statistics.median(gap for gap in gaps if gap < MOST_GAP_S)
    with out.open("w", encoding="utf-8") as file:
        for before, step in zip(steps, steps[1:], strict=False):
            if any(w.begin <= step["start"] and step["wall"] <= w.end for w in windows):
                gap = step["began"] - before["ended"]
                gap = gap if step["decodes"] and gap < MOST_GAP_S else min(gap, usual)
                file.write(json.dumps(step | {"began": step["began"] - gap}) + "\n")


def ways(
    live: Ran,
    entries: list[tuple[ev.Event, list[ev.Action]]],
    steps: list[dict],
    windows: list[Window],
) -> tuple[list[float], list[float]]:
    """Return the delays to the engine and back, in seconds: from each turn's assignment until the
    engine could begin a step with it, and from the step with its last token until the coordinator
    knew.

    A turn of n tokens is in the n steps up to that one. It arrived at an unknown time during the
    step before them, so the middle of the possible times is used. Turns without a free seat have
    none."""
    seats = cfg.load(live.run / "config.json").rollout.max_sequences
    begins, ends = (np.array([step[key] for step in steps]) for key in ("start", "wall"))
    assigned = {
        (a.turn, a.attempt): event.at
        for event, actions in entries
        for a in actions
        if isinstance(a, ev.AssignTurn)
    }
    known = {event.turn: event.at for event, _ in entries if isinstance(event, ev.TurnEnded)}
    there, back = [], []
    ranks = (rank for rank in read_events(live.run) if rank.role == "rollout")
    for event in (event for rank in ranks for event in rank.events):
        if event["kind"] != "span" or event["name"] != "turn":
            continue
        turn = event["args"]["turn"]
        at, end = assigned.get((turn, event["args"]["attempt"])), known.get(turn)
        last = int(np.searchsorted(ends, event["end"])) - 1
        before = last - event["args"]["tokens"]
        if at is None or end is None or before < 0:
            continue
        if not any(window.begin <= at and end <= window.end for window in windows):
            continue
        back.append(end - ends[last])
        if steps[before]["decodes"] + len(steps[before]["prefill"]) < seats:
            latest = begins[before + 1]
            idle = latest - ends[before] > IDLE_S  # arrival just when the step began
            there.append(latest - at if idle else (max(begins[before], at) + latest) / 2 - at)
    return there, back


# --------------------------------------------------------------------------- predicted, measured


def parts(c: cfg.Config, profile: Profile) -> tuple[spec.Engine, spec.Link, spec.Trainer]:
    """Return this machine's engine by quota, the way of a version to it, and the trainer."""
    seats, kv = (c.rollout.max_sequences, c.rollout.max_batched_tokens), profile.kv_tokens
    engine = spec.Engine(profile.step, *seats, kv, c.rollout.prefix_caching)
    phases, pause_s = profile.phases, profile.pause_s
    way_s = max(0.0, phases.sync_s - pause_s)
    link = spec.Link(way_s, FREE_BYTES_S, 0.0, True, pause_s, 0.0)
    return engine, link, spec.Trainer(0, GPU, 1.0, 0.0, phases.step_s, 0.0, phases.token_s)


def simulated(
    c: cfg.Config,
    profile: Profile,
    name: str,
    steps: int,
    batch: spec.Batch,
    pools: Sequence[spec.Pool],
    sandboxes: spec.Sandboxes | None = None,
) -> spec.Spec:
    """Return a run with the episodes, the trainer and the delays of the profile."""
    episodes = calibrate.Recorded(profile.groups, c.env.max_new_tokens)
    delays = TICK_S, PROGRESS_S, profile.dispatch_s, profile.answer_s, c.transfer.in_flight
    *_, trainer = parts(c, profile)
    own = name, steps, batch, episodes, trainer, tuple(pools)
    return spec.Spec(*own, *delays, sandboxes=sandboxes)


def predicted(c: cfg.Config, profile: Profile, steps: int) -> Figures:
    """Simulate a configuration and return the means over seeds."""
    engine, link, _ = parts(c, profile)
    at_once, size = spec.Allocation(0.0, 0.0), c.rollout.group_size
    pool = spec.Pool("rollout", "dedicated", GPU, 1, engine, link, at_once, c.rollout.workers)
    batch = spec.Batch(c.trainer.batch_size // size, size, c.algorithm.dynamic_sampling)
    what = simulated(c, profile, c.name, steps, batch, [pool])
    found = []
    for seed in range(SEEDS):
        tail = Durations(SKIP + 1)
        ran = simulate(what, build(c.scheduler, c.rollout.turn_timeout_s), seed, tail)
        step_s = statistics.median(step.seconds for step in ran.steps[SKIP:])
        tail_s = statistics.median(tail.p95.values())
        found.append((step_s, tail_s, ran.utilisation("dedicated")))
    return Figures(*np.mean(found, axis=0))


def measured(runs: list[Ran]) -> tuple[Figures, tuple[float, float]]:
    """Return the measured figures, and the quartiles of the step time."""
    rows, tails = [], []
    for live in runs:
        tail = Durations(SKIP + 1)
        for event, actions in live.entries():
            tail.write(event, actions)
        calm = live.calm_steps(SKIP)
        rows += calm
        tails += [tail.p95[row["step"]] for row in calm if row["step"] in tail.p95]
    low, middle, high = np.quantile([row["time_step"] for row in rows], [0.25, 0.5, 0.75])
    used = statistics.median(row["engine_utilisation"] for row in rows)
    return Figures(float(middle), statistics.median(tails), used), (low, high)


def run_all(folder: Path, names: list[str], options: Any, alike: list[str]) -> dict[str, list[Ran]]:
    """Run all configurations until each has ENOUGH steps. Raises `SystemExit` if some don't."""
    done: dict[str, list[Ran]] = {name: [] for name in names}

    def lacking() -> dict[str, int]:
        counts = {name: sum(len(r.calm_steps(SKIP)) for r in runs) for name, runs in done.items()}
        return {name: count for name, count in counts.items() if count < ENOUGH}

    for at in range(options.rounds):
        for name in lacking():
            log = folder / f"{name}-{at}.jsonl" if name in PROFILES else None
            live = Ran(folder, f"{name}-{at}")
            if not live.finished:
                wait_for_calm(print)
                words = [*alike, *(PROFILES | LIVE)[name].split()]
                live = Live(folder, f"{name}-{at}", words, options.quota, log)
                live.wait(DEADLINE_S)
            done[name].append(live)
            calm = f"{len(live.calm_steps(SKIP))} of {len(live.steps(SKIP))} steps"
            print(f"round {at + 1}, {name}: {calm} on a calm machine", flush=True)
    if short := lacking():
        counts = ", ".join(f"{name} {count} of {ENOUGH}" for name, count in short.items())
        raise SystemExit(
            f"too few training steps without other guests of the host: {counts}; --keep and more "
            "--rounds"
        )
    return done


def row_of(name: str, sim: Figures, live: Figures, quartiles: tuple[float, float]) -> dict:
    """Return a row of the table: predicted and measured figures, and by how much they differ."""
    row: dict[str, Any] = {"run": name}
    for field, one, other in zip(Figures._fields, sim, live, strict=True):
        row |= {f"{field}_predicted": one, f"{field}_measured": other}
        row[f"{field}_off"] = one / other - 1
    return row | dict(zip(("step_measured_q1", "step_measured_q3"), quartiles, strict=True))


def main() -> None:
    own = {"quota": 0.4, "rounds": 6, "steps": 12, "only": list(LIVE), "csv": Path, "keep": Path}
    args = flagged(__doc__, None, "OVERRIDE", **own)
    end_in_order()
    if args.steps < SKIP + 2:
        raise Failed(f"--steps {args.steps}: at least two beyond the first {SKIP}")
    alike = [f"trainer.steps={args.steps}", "serving=none", *args.words]
    with tempfile.TemporaryDirectory(prefix="rose-validate-") as scratch:
        folder = (args.keep or Path(scratch)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        done = run_all(folder, [*PROFILES, *args.only], args, alike)
        profile = profile_of(
            [(live, folder / f"{live.run.name}.jsonl") for name in PROFILES for live in done[name]]
        )
        rows = []
        for name in args.only:
            config = cfg.load(done[name][0].run / "config.json")
            figures = predicted(config, profile, args.steps), *measured(done[name])
            rows.append(row_of(name, *figures))
        show(rows, f"simulated and measured, engines of {args.quota:g} cores")
        print(f"mean error of a step of the engine: {profile.error:.0%}")
        if args.csv:
            write_csv(args.csv, rows)


if __name__ == "__main__":
    main()
