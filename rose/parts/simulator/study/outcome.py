"""The figures of one simulated run of one system, for comparison by `gains` and `table`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean
from typing import Any, NamedTuple

import msgspec
import numpy as np

from rose.parts.simulator.result import Result, ServingUse, Step

BINS = 400  # ours: bins of the timeline over the run, as many as a screen shows
MOST_ROWS = 64  # ours: rows of the timeline, as many as a screen shows; else every nth worker
MINUTE_S = 60.0  # definition: seconds of a minute
BORROWED = ("cooperative", "spot", "serverless", "hybrid")


class Picture(msgspec.Struct, frozen=True):
    """The data of one run that the page draws; times in seconds from the run's start."""

    end: float
    steps: list[list[float]]  # per step: [begin, end of rollout, end of training, end]
    workers: list[str]
    kinds: list[str]  # kind of each worker
    busy: list[list[float]]  # per worker: share of each bin of the run with a turn
    # curves over serving["x"], with one point a minute; empty without cooperative workers
    serving: dict[str, list[Any]]


class Outcome(msgspec.Struct, frozen=True):
    """The figures of a run, in seconds, tokens and shares of 0..1. NaN: no value. Times and rates
    of steps, staleness and `hidden` omit the warm-up; all other figures are of the whole run."""

    point: str  # name of the sweep's point, or of the run
    system: str
    seed: int
    step_s: float
    rollout_s: float
    train_s: float
    sync_s: float
    trajectories_s: float  # trained trajectories per second: end-to-end throughput
    tokens_s: float  # trained tokens per second
    dropped: float  # share of the generated tokens that no step trains on
    staleness: float  # versions, mean over trained groups
    staleness_max: float
    tail: float  # 99th percentile of the trajectories' durations over their median
    utilisation: float  # share of the dedicated engines' time in which they have a turn
    attainment: float  # share of online requests within both P99 targets
    ttft_p99_s: float  # P99 of online requests over the run; `alone_`: as if no rollout had run
    tpot_p99_s: float
    gap_p99_s: float  # P99 between two tokens of a request while rollouts compute
    alone_ttft_p99_s: float
    alone_tpot_p99_s: float
    alone_gap_p99_s: float
    allocation: float  # share of the borrowed workers' time before they are ready
    migrations: float  # moves of turns to another worker, per step
    wall_s: float  # duration of the simulation itself
    hidden: float = math.nan  # share of the training's time before batches were complete
    serving_busy: float = math.nan  # share of the time in which online serving alone computes
    serving_lent: float = math.nan  # share of its devices' compute that rollouts get
    # with sandboxes:
    remade: float = math.nan  # share of the generated tokens that were lost with a host
    saved_mb: float = math.nan  # MB received by the store, per step
    save_s: float = math.nan  # wait of the commands for saves, per trajectory
    lost_hosts: float = math.nan  # per step
    moved: float = math.nan  # trajectories moved to less loaded hosts, per step
    picture: Picture | None = None


class Metric(NamedTuple):
    """A column of the tables."""

    key: str
    title: str
    form: str
    better: int  # 1: more is better; -1: less is better; 0: neither


METRICS = (
    Metric("step_s", "Step, s", "{:,.1f}", -1),
    Metric("rollout_s", "Rollout, s", "{:,.1f}", -1),
    Metric("trajectories_s", "Trained/s", "{:,.2f}", 1),
    Metric("tokens_s", "Tokens/s", "{:,.0f}", 1),
    Metric("staleness", "Staleness", "{:.2f}", 0),
    Metric("tail", "p99/p50", "{:.1f}", -1),
    Metric("dropped", "Dropped", "{:.1%}", -1),
    Metric("attainment", "SLO kept", "{:.2%}", 1),
    Metric("allocation", "Allocation", "{:.2%}", -1),
)
STREAM = (Metric("hidden", "Hidden", "{:.0%}", 0),)
SANDBOXES = (
    Metric("remade", "Made twice", "{:.2%}", -1),
    Metric("saved_mb", "Saved, MB/step", "{:,.0f}", -1),
    Metric("save_s", "Saving, s", "{:,.2f}", -1),
    Metric("lost_hosts", "Hosts lost/step", "{:,.2f}", 0),
    Metric("moved", "Moved/step", "{:,.1f}", 0),
)
EVERY = tuple(
    field
    for field in Outcome.__struct_fields__
    if field not in ("point", "system", "seed", "picture")
)


def metrics(outcomes: Sequence[Outcome]) -> tuple[Metric, ...]:
    """Return the columns for a table of these outcomes."""
    stream = STREAM if any(o.hidden > 0 for o in outcomes) else ()
    if not any(o.lost_hosts >= 0 for o in outcomes):
        return (*METRICS, *stream)
    return tuple(
        metric
        for metric in (*METRICS, *stream, *SANDBOXES)
        if not all(math.isnan(value) for value in values(outcomes, metric.key))
    )


def of(result: Result, point: str, system: str, warmup: int, wall_s: float, drawn: bool) -> Outcome:
    """Return the outcome of a run, with its picture if `drawn`. Raises `ValueError` if it has no
    step after the warm-up."""
    steps = result.steps[warmup:]
    if not steps:
        raise ValueError(
            f"{len(result.steps)} steps, of which warmup={warmup} are not counted, leave none"
        )
    seconds = steps[-1].ended - (result.steps[warmup - 1].ended if warmup else 0.0)
    stale = [age for step in steps for age in step.staleness]
    counts = result.counts
    generated = result.tokens + counts.dropped_tokens + counts.crashed_tokens + counts.remade_tokens
    return Outcome(
        point=point,
        system=system,
        seed=result.seed,
        step_s=seconds / len(steps),
        rollout_s=fmean(step.rollout_s for step in steps),
        sync_s=fmean(step.sync_s for step in steps),
        train_s=fmean(step.trained_at - step.training_at for step in steps),
        trajectories_s=sum(step.trajectories for step in steps) / seconds,
        tokens_s=sum(step.tokens for step in steps) / seconds,
        dropped=1 - result.tokens / generated if generated else math.nan,
        staleness=fmean(stale) if stale else math.nan,
        staleness_max=float(max(stale, default=0)),
        tail=_tail(result.trajectory_s),
        utilisation=result.utilisation("dedicated"),
        attainment=_attainment(result.serving),
        **_latencies(result.serving),
        allocation=_allocation(result),
        migrations=counts.migrations / len(result.steps),
        wall_s=wall_s,
        hidden=_hidden_share(steps),
        **(_sandboxes(result, generated) if result.sandboxes else {}),
        picture=_picture(result) if drawn else None,
    )


def _tail(seconds: np.ndarray) -> float:
    """Return the P99 of the trajectories' durations over their median."""
    late = 99  # definition: the column p99/p50
    return float(np.percentile(seconds, late) / np.median(seconds)) if len(seconds) else math.nan


def _hidden_share(steps: Sequence[Step]) -> float:
    """Return the share of the training's time that lay before its batch was complete."""
    ahead_s = sum(step.ahead_s for step in steps)
    after_s = sum(step.trained_at - step.training_at for step in steps)
    return ahead_s / (ahead_s + after_s) if after_s else math.nan


def _attainment(serving: Sequence[ServingUse]) -> float:
    """Return the share of online requests within both targets, over all pools."""
    requests = np.concatenate([use.minute_requests for use in serving]) if serving else np.zeros(0)
    if not requests.sum():
        return math.nan
    attained = np.concatenate([use.minute_attained for use in serving])
    return float(np.nansum(requests * attained) / requests.sum())


def _latencies(serving: Sequence[ServingUse]) -> dict[str, float]:
    """Return the first pool's latencies, and the shares of compute that serving uses and lends."""
    if not serving:
        return {
            f"{when}{what}_p99_s": math.nan
            for when in ("", "alone_")
            for what in ("ttft", "tpot", "gap")
        }
    beside, alone, gaps = serving[0].beside, serving[0].alone, serving[0].gap_p99_s
    return {
        "ttft_p99_s": beside.ttft_p99_s,
        "tpot_p99_s": beside.tpot_p99_s,
        "gap_p99_s": gaps[1],
        "alone_ttft_p99_s": alone.ttft_p99_s,
        "alone_tpot_p99_s": alone.tpot_p99_s,
        "alone_gap_p99_s": gaps[0],
        "serving_busy": float(np.mean(serving[0].minute_busy)),
        "serving_lent": serving[0].lent,
    }


def _allocation(result: Result) -> float:
    """Return the share of the borrowed workers' time before they were ready."""
    held = sum(worker.held_s for worker in result.workers if worker.kind in BORROWED)
    return result.allocation_s / (held + result.allocation_s) if held else math.nan


def _sandboxes(result: Result, generated: int) -> dict[str, float]:
    """Return the figures that only runs with sandboxes have."""
    counts, steps = result.counts, len(result.steps)
    return {
        "remade": counts.remade_tokens / generated if generated else math.nan,
        "saved_mb": counts.saved_bytes / 1e6 / steps,
        "save_s": counts.save_s / max(1, len(result.trajectory_s)),
        "lost_hosts": counts.lost_hosts / steps,
        "moved": counts.moved / steps,
    }


def _picture(result: Result) -> Picture:
    end = max(result.seconds, result.steps[-1].ended)
    rows = result.workers[:: max(1, -(-len(result.workers) // MOST_ROWS))]
    return Picture(
        end=round(end, 1),
        steps=[_phases(step) for step in result.steps],
        workers=[row.name for row in rows],
        kinds=[row.kind for row in rows],
        busy=[shares(row.spans, end, BINS) for row in rows],
        serving=_serving(result, end),
    )


def _phases(step: Step) -> list[float]:
    return [round(at, 2) for at in (step.began, step.training_at, step.trained_at, step.ended)]


def shares(spans: np.ndarray, end: float, bins: int) -> list[float]:
    """Divide [0, end] into `bins` equal parts and return the share of each that the spans cover.
    The spans (n, 2) must be ascending and disjoint."""
    edges = np.linspace(0.0, end, bins + 1)
    if not len(spans):
        return [0.0] * bins
    lengths = np.concatenate([[0.0], np.cumsum(spans[:, 1] - spans[:, 0])])
    index = np.searchsorted(spans[:, 0], edges, side="right")  # number of spans begun by then
    last = np.maximum(index - 1, 0)
    over = np.where(index > 0, np.minimum(edges, spans[last, 1]) - spans[last, 0], 0.0)
    covered = lengths[last] + over
    return np.round(np.clip(np.diff(covered) / np.diff(edges), 0.0, 1.0), 2).tolist()


def _serving(result: Result, end: float) -> dict[str, list[Any]]:
    """Return the curves of the first cooperative pool."""
    if not result.serving:
        return {}
    use = result.serving[0]
    minutes = len(use.minute_busy)
    lent = [
        shares(worker.spans, minutes * MINUTE_S, minutes)
        for worker in result.workers
        if worker.pool == use.pool
    ]
    return {
        "x": [(minute + 0.5) * MINUTE_S for minute in range(minutes)],
        "busy": _numbers(use.minute_busy),
        "requests": _numbers(use.minute_requests),
        "attained": _numbers(use.minute_attained),
        "lent": _numbers(np.mean(lent, axis=0)) if lent else [],
    }


def _numbers(values: np.ndarray) -> list[float | None]:
    """Round the values for JSON, and replace NaN by None."""
    return [
        None if math.isnan(value) else round(value, 4)  # ours: digits in a drawing
        for value in np.asarray(values, float).tolist()
    ]


def values(outcomes: Sequence[Outcome], key: str) -> list[float]:
    return [getattr(outcome, key) for outcome in outcomes]


def mean(outcomes: Sequence[Outcome], key: str) -> float:
    """Return the mean over the seeds; NaN if a seed has no value."""
    return fmean(values(outcomes, key)) if outcomes else math.nan


def shown(metric: Metric, value: float) -> str:
    return "–" if math.isnan(value) else metric.form.format(value)


def by_system(outcomes: Sequence[Outcome]) -> dict[str, list[Outcome]]:
    """Return the outcomes of each system, sorted by seed; systems are in order of appearance."""
    found: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        found.setdefault(outcome.system, []).append(outcome)
    return {name: sorted(rows, key=lambda row: row.seed) for name, rows in found.items()}
