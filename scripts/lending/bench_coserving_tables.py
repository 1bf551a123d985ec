"""The results of bench_coserving.py as a table."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import mean

import numpy as np

ALONE, OURS = "alone", "ours"
METRICS = ("ttft_p50", "ttft_p99", "tpot_p50", "tpot_p99")
ENDS = ("low", "mean", "high")  # lowest, mean and highest value of the seeds


@dataclass
class Slo:
    """Latency targets in seconds. A request meets them if it meets both P99 targets."""

    ttft_p50: float
    ttft_p99: float
    tpot_p50: float
    tpot_p99: float

    def __str__(self) -> str:
        ttft = f"{1e3 * self.ttft_p50:.0f} and {1e3 * self.ttft_p99:.0f}"
        tpot = f"{1e3 * self.tpot_p50:.1f} and {1e3 * self.tpot_p99:.1f}"
        return f"TTFT {ttft} ms, TPOT {tpot} ms"


@dataclass
class Run:
    """The results of one scenario under the traffic of one seed."""

    scenario: str
    seed: int
    seconds: float  # length of the traffic
    ttft: list[float | None]  # seconds per request; None if no token arrived
    tpot: list[float | None]  # seconds; None for requests with one token or not done
    done: list[bool]
    late_p99: float  # seconds between a request's time and its sending by the client
    busy: float  # share of the device's time that S's engine computed
    made: float = 0.0  # rollout tokens per second
    evicted: int = 0  # turns that R's engine aborted
    wasted: int = 0  # prompt and output tokens of aborted turns
    preempted: int = 0  # preemptions of online requests, which lost their KV memory
    # Share of the time with rollout work in which R's gate was open.
    open: float | None = None
    why: list[str] = field(default_factory=list)  # reasons of requests that were not done
    stolen: float = 0.0  # share of the machine's time that the hypervisor took meanwhile

    def latency(self, metric: str) -> float:
        return pooled([self], metric)

    def met(self, slo: Slo) -> int:
        """Return the number of requests that were done and met the targets."""
        return sum(
            done and ttft <= slo.ttft_p99 and (tpot is None or tpot <= slo.tpot_p99)
            for done, ttft, tpot in zip(self.done, self.ttft, self.tpot, strict=True)
        )


@dataclass
class Alone:
    """Rollout tokens per second of processor time when R has the whole device, a number a seed."""

    engine: list[float]  # R's own engine
    server: list[float]  # low-priority requests to a server that serves both


def percentile(values: list[float | None], share: float) -> float:
    known = [value for value in values if value is not None]
    return float(np.percentile(known, share)) if known else float("nan")


def pooled(runs: list[Run], metric: str) -> float:
    """Return a percentile over the requests of all these runs."""
    kind, _, share = metric.partition("_p")
    return percentile([value for run in runs for value in getattr(run, kind)], float(share))


def ratios(runs: list[Run], scenario: str, metric: str) -> list[float]:
    """Return a ratio for each run of the scenario: its latency to the mean of S alone's runs with
    the same seed. For S alone, each run is compared with the seed's other runs, which shows the
    machine's noise. Seeds in which S alone generated too few tokens for a latency are left out."""
    found = []
    for run in runs:
        others = (it for it in runs if (it.scenario, it.seed) == (ALONE, run.seed))
        beside = [other.latency(metric) for other in others if other is not run]
        if run.scenario == scenario and beside and (alone := mean(beside)):
            found.append(run.latency(metric) / alone)
    return found


def harvest(runs: list[Run], scenario: str, alone: Alone) -> list[float]:
    """Return for each seed the share of the idle compute that rollouts used: rollout tokens/s,
    divided by those that R would generate in the time that S alone leaves idle."""
    kind = alone.server if scenario == "priority" else alone.engine
    idle = 1 - mean(run.busy for run in runs if run.scenario == ALONE)
    return [run.made / (mean(kind) * idle) for run in runs if run.scenario == scenario]


def table(runs: list[Run], slo: Slo, alone: Alone) -> list[dict]:
    """Return one row a scenario. Latencies are seconds over the requests of all seeds. Ratios,
    attainment and harvest have the lowest, mean and highest value of the seeds."""
    rows = []
    for scenario in dict.fromkeys(run.scenario for run in runs):
        mine = [run for run in runs if run.scenario == scenario]
        opened = [run.open for run in mine if run.open is not None]
        row: dict = {"scenario": scenario, "requests": sum(len(run.done) for run in mine)}
        row["aborted"] = row["requests"] - sum(sum(run.done) for run in mine)
        row |= {metric: pooled(mine, metric) for metric in METRICS}
        for metric in METRICS:
            row |= spread(f"{metric}_ratio", ratios(runs, scenario, metric))
        row |= spread("attainment", [run.met(slo) / max(1, len(run.done)) for run in mine])
        row |= {key: mean(getattr(run, key) for run in mine) for key in ("busy", "made")}
        row |= spread("harvest", [] if scenario == ALONE else harvest(runs, scenario, alone))
        row["open"] = mean(opened) if opened else None
        for key in ("evicted", "wasted", "preempted"):
            row[key] = sum(getattr(run, key) for run in mine)
        row["late_p99"] = max(run.late_p99 for run in mine)
        rows.append(row)
    return rows


def spread(name: str, values: list[float]) -> dict[str, float | None]:
    found = (min(values), mean(values), max(values)) if values else (None,) * 3
    return {f"{name}_{end}": x for end, x in zip(ENDS, found, strict=True)}


def shown(rows: list[dict]) -> list[dict[str, str]]:
    """Return the rows as they are printed. Latencies are ratios to S alone: mean (range of the
    seeds)."""
    return [
        {
            "": row["scenario"],
            **{m.replace("_", " ").upper(): _range(row, f"{m}_ratio") for m in METRICS},
            "attainment": _range(row, "attainment", 100, "%", 1),
            "idle compute used": _range(row, "harvest", 100, "%", 0),
            "rollout tokens/s": f"{row['made']:.0f}",
            "requests, aborted": f"{row['requests']}, {row['aborted']}",
            "gate open": "" if row["open"] is None else f"{row['open']:.0%}",
        }
        for row in rows
    ]


def _range(row: dict, name: str, times: float = 1, unit: str = "", digits: int = 2) -> str:
    found = [row[f"{name}_{end}"] for end in ENDS]
    if found[0] is None:
        return ""
    low, middle, high = (f"{times * value:.{digits}f}" for value in found)
    return f"{middle}{unit} ({low} to {high})"
