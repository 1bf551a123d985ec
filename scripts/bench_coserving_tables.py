"""What bench_coserving.py measured, as a table."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import mean

import numpy as np
from rich.table import Table

ALONE, OURS = "alone", "ours"
METRICS = ("ttft_p50", "ttft_p99", "tpot_p50", "tpot_p99")


@dataclass
class Slo:
    """Seconds; a request meets it if it meets both P99 targets."""

    ttft_p50: float
    ttft_p99: float
    tpot_p50: float
    tpot_p99: float


@dataclass
class Run:
    """One scenario under one seed's traffic."""

    scenario: str
    seed: int
    seconds: float  # of traffic
    ttft: list[float | None]  # of each request; None: no token came
    tpot: list[float | None]  # None: it has no second token, or was not done
    done: list[bool]
    late_p99: float  # by which the client sent its requests after their time
    busy: float  # share of the device's time that S's engine computed
    made: float = 0.0  # rollout tokens per second
    evicted: int = 0  # turns that R's engine gave back
    wasted: int = 0  # tokens of theirs, computed in vain
    preempted: int = 0  # online requests that lost their memory
    open: float | None = (
        None  # share of the time that R's gate was open, of the time that it had work
    )
    why: list[str] = field(default_factory=list)  # requests that were not done
    began: float = 0.0  # CLOCK_MONOTONIC
    stolen: float = 0.0  # share of the machine's time that a hypervisor gave to others meanwhile

    def latency(self, metric: str) -> float:
        kind, _, share = metric.partition("_p")
        return percentile(getattr(self, kind), float(share))

    def meets(self, slo: Slo) -> list[bool]:
        """Of each request; one that was not done has missed."""
        return [
            done and ttft <= slo.ttft_p99 and (tpot is None or tpot <= slo.tpot_p99)
            for done, ttft, tpot in zip(self.done, self.ttft, self.tpot, strict=False)
        ]

    def met(self, slo: Slo) -> int:
        return sum(self.meets(slo))


@dataclass
class Alone:
    """What R makes of the whole device, tokens per second of processor time, one number a seed."""

    engine: list[float]  # its own engine
    server: list[float]  # as low-priority requests of a server that has the same weights


def percentile(values: list[float | None], share: float) -> float:
    known = [value for value in values if value is not None]
    return float(np.percentile(known, share)) if known else float("nan")


def slo_of(runs: list[Run], factor: float) -> Slo:
    return Slo(*(factor * pooled(runs, metric) for metric in METRICS))


def pooled(runs: list[Run], metric: str) -> float:
    """A percentile over the requests of all these runs."""
    kind, _, share = metric.partition("_p")
    return percentile([value for run in runs for value in getattr(run, kind)], float(share))


def ratios(runs: list[Run], scenario: str, metric: str) -> list[float]:
    """One a seed: to the mean of S alone's runs under the very same traffic. Of S alone: each run
    to the seed's other runs, which is the noise of the machine. Seeds in which S alone made too few
    tokens for a latency are left out."""
    found = []
    for run in runs:
        if run.scenario != scenario:
            continue
        beside = [
            other.latency(metric)
            for other in runs
            if other.scenario == ALONE and other.seed == run.seed and other is not run
        ]
        if beside and (alone := mean(beside)):
            found.append(run.latency(metric) / alone)
    return found


def harvest(runs: list[Run], scenario: str, alone: Alone) -> list[float]:
    """Rollout tokens/s of what R would make in the time that S alone leaves idle; one a seed."""
    kind = alone.server if scenario == "priority" else alone.engine
    idle = 1 - mean(run.busy for run in runs if run.scenario == ALONE)
    return [run.made / (mean(kind) * idle) for run in runs if run.scenario == scenario]


def table(runs: list[Run], slo: Slo, alone: Alone) -> list[dict]:
    """One row a scenario; latencies in seconds over the requests of all seeds; of the seeds'
    ratios, attainment and harvest the lowest, the mean and the highest."""
    rows = []
    for scenario in dict.fromkeys(run.scenario for run in runs):
        mine = [run for run in runs if run.scenario == scenario]
        row = {
            "scenario": scenario,
            "requests": sum(len(run.done) for run in mine),
            "aborted": sum(len(run.done) - sum(run.done) for run in mine),
        }
        row |= {metric: pooled(mine, metric) for metric in METRICS}
        for metric in METRICS:
            row |= spread(f"{metric}_ratio", ratios(runs, scenario, metric))
        row |= spread("attainment", [run.met(slo) / max(1, len(run.done)) for run in mine])
        row |= {
            "busy": mean(run.busy for run in mine),
            "made": mean(run.made for run in mine),
            **spread("harvest", [] if scenario == ALONE else harvest(runs, scenario, alone)),
            "open": _mean([run.open for run in mine]),
            "evicted": sum(run.evicted for run in mine),
            "wasted": sum(run.wasted for run in mine),
            "preempted": sum(run.preempted for run in mine),
            "late_p99": max(run.late_p99 for run in mine),
        }
        rows.append(row)
    return rows


def spread(name: str, values: list[float]) -> dict[str, float | None]:
    found = (min(values), mean(values), max(values)) if values else (None,) * 3
    return {f"{name}_{end}": x for end, x in zip(("low", "mean", "high"), found, strict=True)}


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return mean(known) if known else None


def shown(rows: list[dict], slo: Slo) -> Table:
    """Latencies as ratios to S alone under the same traffic: mean (range of the seeds)."""
    made = Table(
        title=f"targets: TTFT {1e3 * slo.ttft_p50:.0f} and {1e3 * slo.ttft_p99:.0f} ms, TPOT "
        f"{1e3 * slo.tpot_p50:.1f} and {1e3 * slo.tpot_p99:.1f} ms",
        title_justify="left",
    )
    columns = ["", "TTFT P50", "TTFT P99", "TPOT P50", "TPOT P99", "attainment"]
    columns += ["idle compute used", "rollout tokens/s", "requests, aborted", "gate open"]
    for column in columns:
        made.add_column(column, justify="right" if column else "left")
    for row in rows:
        made.add_row(
            row["scenario"],
            *(_range(row, f"{metric}_ratio") for metric in METRICS),
            _range(row, "attainment", 100, "%", 1),
            _range(row, "harvest", 100, "%", 0),
            f"{row['made']:.0f}",
            f"{row['requests']}, {row['aborted']}",
            "" if row["open"] is None else f"{100 * row['open']:.0f}%",
        )
    return made


def _range(row: dict, name: str, times: float = 1, unit: str = "", digits: int = 2) -> str:
    if row[f"{name}_mean"] is None:
        return ""
    low, middle, high = (
        f"{times * row[f'{name}_{end}']:.{digits}f}" for end in ("low", "mean", "high")
    )
    return f"{middle}{unit} ({low} to {high})"
