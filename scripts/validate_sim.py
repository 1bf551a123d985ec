"""The simulator's predictions beside live runs on this machine: step time, tail and utilisation.

    python scripts/validate_sim.py                                # all configurations, some 20 minutes
    python scripts/validate_sim.py --only sync_2 dapo_2 --steps 4 # a look
    python scripts/validate_sim.py --quota 0.4 --csv docs/results/validate_sim.csv

One live run with one engine is the profile. From it come the engine's step time (its step log, the time between two
steps included), the episodes (its journal: turns, tokens, tool times), the trainer's and the synchronisation's seconds,
and the way between coordinator and engine. Then every configuration runs live and is simulated with those numbers, on
the very configuration of the run. The profile is not among the predicted runs, and no number is fitted to these.

Each engine is confined to the same CPU quota (live_runs.py). The policy does not learn (a learning rate of 1e-9), so
that all runs meet the same lengths. Compared are, without the first steps:

    step          mean of the training steps, s
    tail          95th percentile of the time from a group's admission to a trajectory's end, s
    utilisation   share of the step in which a dedicated engine had a turn

The figures mean something on a machine that does nothing else: --quota times engines, the trainer's thread and the
environment host must find a core each time they want one.
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
import tempfile
from pathlib import Path
from typing import NamedTuple

import numpy as np
from live_runs import Durations, Live, Ran
from rich.console import Console
from rich.table import Table

from rose import config as cfg
from rose.observe.recorder import read_events
from rose.roles.coordinator import TICK_S
from rose.roles.rollout import PROGRESS_S
from rose.rollout import replay
from rose.scheduler import build
from rose.scheduler import events as ev
from rose.sim import calibrate, spec
from rose.sim.driver import simulate

PROFILE = ("rollout.workers=1", "trainer.batch_size=48", "scheduler/routing=cache_affine")
LIVE: dict[str, tuple[str, ...]] = {  # none is the profile
    "sync_2": ("rollout.workers=2", "trainer.batch_size=64", "scheduler/routing=cache_affine"),
    "sync_1_low": ("rollout.workers=1", "trainer.batch_size=16", "scheduler/routing=least_loaded"),
    "round_robin_2_queued": ("rollout.workers=2", "trainer.batch_size=64", "scheduler/routing=round_robin",
                             "rollout.max_sequences=8"),
    "dapo_2": ("rollout.workers=2", "trainer.batch_size=32", "scheduler/batching=dapo"),
    "tail_batching_1": ("rollout.workers=1", "trainer.batch_size=32", "scheduler/batching=tail_batching"),
    "seer_2": ("rollout.workers=2", "trainer.batch_size=48", "scheduler/routing=seer", "scheduler/order=longest_first"),
    "one_step_off_1": ("rollout.workers=1", "trainer.batch_size=32", "scheduler/batching=one_step_off"),
    "areal_2": ("rollout.workers=2", "trainer.batch_size=64", "scheduler/batching=bounded_staleness",
                "scheduler.batching.args.eta=1"),
}
MOST_GAP_S = 0.1  # between steps of a busy engine: more is no overhead
DEADLINE_S = 1800.0
FREE_BYTES_S = 1e12  # the versions' way is measured as a whole: latency
SEEDS = 5  # of each prediction


class Figures(NamedTuple):
    step: float
    tail: float
    utilisation: float


class Profile(NamedTuple):
    """What a simulation needs beyond the configuration."""

    step: spec.StepTime
    error: float  # of its fit
    groups: list[list[spec.Episode]]
    phases: calibrate.Phases
    dispatch_s: float
    pause_s: float
    kv_tokens: int


# --------------------------------------------------------------------------- profile


def profile_of(live: Ran, log: Path, skip: int) -> Profile:
    whole = log.with_suffix(".whole")
    between_included(log, whole)
    step, error = calibrate.of_steps([whole])
    saved = {row["step"]: replay.load(live.run, row["step"]) for row in live.steps(0)}
    tokens = {at: sum(len(t.mask) for group in groups for t in group) for at, groups in saved.items()}
    rewards = {t.id: t.reward for groups in saved.values() for group in groups for t in group}
    [path] = (live.run / "journal").glob("attempt-*.jsonl")
    entries = live.entries()
    joined = next(event for event, _ in entries if isinstance(event, ev.WorkerJoined))
    return Profile(step, error, calibrate.of_journal(path, rewards),
                   calibrate.of_metrics(live.run / "metrics.jsonl", tokens, skip), dispatch_s(live, entries),
                   statistics.mean(row["sync_pause_s"] for row in live.steps(skip)), joined.kv_tokens)


def between_included(log: Path, out: Path) -> None:
    """The log with each step of decodes beginning where the one before ended: such requests were there, and what lay
    between was the engine's own work. Other steps get the median of that."""
    steps = [json.loads(line) for line in log.read_text().splitlines()]
    gaps = [b["began"] - a["ended"] for a, b in zip(steps, steps[1:]) if b["decodes"]]
    usual = statistics.median(gap for gap in gaps if gap < MOST_GAP_S)
    with out.open("w") as file:
        for before, step in zip(steps, steps[1:]):
            gap = step["began"] - before["ended"]
            gap = gap if step["decodes"] and gap < MOST_GAP_S else min(gap, usual)
            file.write(json.dumps(step | {"began": step["began"] - gap}) + "\n")


def dispatch_s(live: Ran, entries: list[tuple[ev.Event, list[ev.Action]]]) -> float:
    """Half of the median time by which a turn is longer for the coordinator than for its worker."""
    assigned = {(a.turn, a.attempt): event.at for event, actions in entries for a in actions
                if isinstance(a, ev.AssignTurn)}
    ended = {event.turn: event.at for event, _ in entries if isinstance(event, ev.TurnEnded)}
    spans = [event for rank in read_events(live.run) if rank.role == "rollout" for event in rank.events
             if event["kind"] == "span" and event["name"] == "turn"]
    ways = [ended[args["turn"]] - assigned[args["turn"], args["attempt"]] - (span["end"] - span["start"])
            for span in spans if (args := span["args"])["turn"] in ended and (args["turn"], args["attempt"]) in assigned]
    return max(0.0, statistics.median(ways) / 2)


# --------------------------------------------------------------------------- predicted, measured


def predicted(c: cfg.Config, profile: Profile, steps: int, skip: int) -> Figures:
    """Means over seeds."""
    gpu = spec.Gpu("cpu", 1.0, 1.0, 1.0, "this machine's, by quota")
    engine = spec.Engine(profile.step, c.rollout.max_sequences, c.rollout.max_batched_tokens, profile.kv_tokens,
                         c.rollout.prefix_caching)
    link = spec.Link(max(0.0, profile.phases.sync_s - profile.pause_s), FREE_BYTES_S, 0.0, True, profile.pause_s, 0.0)
    pool = spec.Pool("rollout", "dedicated", gpu, 1, engine, link, spec.Allocation(0.0, 0.0), c.rollout.workers)
    trainer = spec.Trainer(0, gpu, 1.0, 0.0, profile.phases.step_s, 0.0, profile.phases.token_s)
    batch = spec.Batch(c.trainer.batch_size // c.rollout.group_size, c.rollout.group_size, c.algorithm.dynamic_sampling)
    what = spec.Spec(c.name, steps, batch, calibrate.Recorded(profile.groups, c.env.max_new_tokens), trainer, (pool,),
                     TICK_S, PROGRESS_S, profile.dispatch_s, c.transfer.in_flight)
    found = []
    for seed in range(SEEDS):
        tail = Durations(skip + 1)
        ran = simulate(what, build(c.scheduler, c.rollout.turn_timeout_s), seed, tail)
        found.append(Figures(statistics.mean(step.seconds for step in ran.steps[skip:]), tail.p95,
                             ran.utilisation("dedicated")))
    return Figures(*np.mean(found, axis=0))


def measured(live: Ran, skip: int) -> tuple[Figures, float]:
    """And the standard error of the mean step time."""
    rows, tail = live.steps(skip), Durations(skip + 1)
    for event, actions in live.entries():
        tail.write(event, actions)
    times = [row["time_step"] for row in rows]
    busy = sum(row["engine_utilisation"] * row["time_step"] for row in rows) / sum(times)
    error = statistics.stdev(times) / len(times) ** 0.5 if len(times) > 1 else float("nan")
    return Figures(statistics.mean(times), tail.p95, busy), error


def run(folder: Path, name: str, overrides: list[str], quota: float, log: Path | None = None) -> Ran:
    if Ran(folder, name).finished:
        return Ran(folder, name)
    live = Live(folder, name, overrides, quota, log)
    live.wait(DEADLINE_S)
    return live


def show(rows: list[tuple[str, Figures, Figures, float]], profile: Profile, quota: float, console: Console) -> None:
    table = Table(title=f"simulated and measured, engines of {quota:g} cores")
    table.add_column("run")
    for name in Figures._fields:
        for column in (name, "live", "off"):
            table.add_column(column, justify="right")
    for name, sim, live, error in rows:
        cells = []
        for field, a, b in zip(Figures._fields, sim, live):
            spread = f" ±{error:.2f}" if field == "step" else ""
            cells += [f"{a:.2f}", f"{b:.2f}{spread}", f"{100 * (a / b - 1):+.0f}%"]
        table.add_row(name, *cells)
    console.print(table)
    c = profile.step
    console.print(f"engine: {1e3 * c.c0:.2f} ms, {1e3 * c.c1:.3f} ms per prompt token, {1e3 * c.c3:.3f} ms per decode "
                  f"(mean error of a step {100 * profile.error:.0f}%); trainer {profile.phases.step_s:.2f} s + "
                  f"{1e3 * profile.phases.token_s:.3f} ms per token; sync {profile.phases.sync_s:.2f} s; way to an "
                  f"engine {1e3 * profile.dispatch_s:.1f} ms; {sum(map(len, profile.groups))} episodes")


def write_csv(path: Path, rows: list[tuple[str, Figures, Figures, float]]) -> None:
    with path.open("w", newline="") as file:
        out = csv.writer(file)
        out.writerow(["run", *(f"{name}_{side}" for name in Figures._fields for side in ("predicted", "measured")),
                      "step_measured_se"])
        for name, sim, live, error in rows:
            out.writerow([name, *(f"{value:.4f}" for pair in zip(sim, live) for value in pair), f"{error:.4f}"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quota", type=float, default=0.4, help="cores of each engine; 0: no quota")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--skip", type=int, default=2, help="first steps that don't count")
    parser.add_argument("--only", nargs="+", choices=list(LIVE), default=list(LIVE))
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--keep", type=Path, help="leave the runs in this folder; finished ones there are used again")
    args, overrides = parser.parse_known_args()
    if args.steps < args.skip + 2:
        parser.error(f"--steps {args.steps}: at least two beyond the --skip {args.skip} first")
    console = Console()
    alike = [f"trainer.steps={args.steps}", "serving=none", *overrides]
    with tempfile.TemporaryDirectory(prefix="rose-validate-") as scratch:
        folder = (args.keep or Path(scratch)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        log = folder / "steps.jsonl"
        profile = profile_of(run(folder, "profile", [*alike, *PROFILE], args.quota, log), log, args.skip)
        rows = []
        for name in args.only:
            live = run(folder, name, [*alike, *LIVE[name]], args.quota)
            config = cfg.load(live.run / "config.json")
            rows.append((name, predicted(config, profile, args.steps, args.skip), *measured(live, args.skip)))
            show(rows[-1:], profile, args.quota, console)
        show(rows, profile, args.quota, console)
        if args.csv:
            write_csv(args.csv, rows)


if __name__ == "__main__":
    main()
