"""What bench_coserving.py measured, as tables, and the targets of the issue, met or not."""

from __future__ import annotations

import csv
import io
from dataclasses import dataclass, field
from statistics import mean

import numpy as np

LATENCY = 1.10  # P99 of ours / P99 of S alone, at most
HARVEST = 0.60  # of the idle compute, at least
FAILS = 1.10  # naive co-location must be slower than that, or the load is too light
ALONE, NAIVE, OURS = "alone", "naive", "ours"
METRICS = ("ttft_p50", "ttft_p99", "tpot_p50", "tpot_p99")
BLOCK = 10  # requests in a row, which share a burst's fate: drawn together
DRAWS = 200


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
    to the seed's other runs, which is the noise of the machine."""
    found = []
    for run in runs:
        if run.scenario != scenario:
            continue
        beside = [
            other.latency(metric)
            for other in runs
            if other.scenario == ALONE and other.seed == run.seed and other is not run
        ]
        if beside:
            found.append(run.latency(metric) / mean(beside))
    return found


def pooled_ratio(runs: list[Run], scenario: str, metric: str) -> tuple[float, float, float]:
    """(low, ratio, high): a percentile over the requests of all seeds to that of S alone, with the
    95% interval of a bootstrap over blocks of each run's requests. P99 of one run is one request or
    two; this says more of the tail."""
    kind, _, share = metric.partition("_p")
    draw, sides = np.random.default_rng(0), []
    for name in (scenario, ALONE):
        blocks = [
            block for run in runs if run.scenario == name for block in _blocks(getattr(run, kind))
        ]
        drawn = draw.integers(0, len(blocks), (DRAWS, len(blocks)))
        sides.append(
            np.array(
                [
                    np.percentile(np.concatenate([blocks[at] for at in row]), float(share))
                    for row in drawn
                ]
            )
        )
    low, high = np.percentile(sides[0] / sides[1], [2.5, 97.5])
    ours, alone = (
        pooled([run for run in runs if run.scenario == name], metric) for name in (scenario, ALONE)
    )
    return float(low), ours / alone, float(high)


def _blocks(values: list[float | None]) -> list[list[float]]:
    known = [value for value in values if value is not None]
    return [known[at : at + BLOCK] for at in range(0, len(known), BLOCK)]


def harvest(runs: list[Run], scenario: str, alone: Alone) -> list[float]:
    """Rollout tokens/s of what R would make in the time that S alone leaves idle; one a seed."""
    kind = alone.server if scenario == "priority" else alone.engine
    idle = 1 - mean(run.busy for run in runs if run.scenario == ALONE)
    return [run.made / (mean(kind) * idle) for run in runs if run.scenario == scenario]


def table(runs: list[Run], slo: Slo, alone: Alone) -> list[dict]:
    """One row a scenario; latencies in seconds over the requests of all seeds, ratios as (lowest,
    mean, highest)."""
    rows = []
    for scenario in dict.fromkeys(run.scenario for run in runs):
        mine = [run for run in runs if run.scenario == scenario]
        count, seconds = sum(len(run.done) for run in mine), sum(run.seconds for run in mine)
        met = sum(run.met(slo) for run in mine)
        row = {
            "scenario": scenario,
            "requests": count,
            "aborted": count - sum(sum(run.done) for run in mine),
        }
        row |= {metric: pooled(mine, metric) for metric in METRICS}
        row |= {f"{metric}_ratio": spread(ratios(runs, scenario, metric)) for metric in METRICS}
        row |= {f"{metric}_pooled": pooled_ratio(runs, scenario, metric) for metric in METRICS}
        row |= {
            "attainment": met / max(1, count),
            "goodput": met / seconds,
            "busy": mean(run.busy for run in mine),
            "attainments": spread([run.met(slo) / max(1, len(run.done)) for run in mine]),
            "made": mean(run.made for run in mine),
            "harvest": None if scenario == ALONE else spread(harvest(runs, scenario, alone)),
            "open": _mean([run.open for run in mine]),
            "evicted": sum(run.evicted for run in mine),
            "wasted": sum(run.wasted for run in mine),
            "preempted": sum(run.preempted for run in mine),
            "late_p99": max(run.late_p99 for run in mine),
        }
        rows.append(row)
    return rows


def spread(values: list[float]) -> tuple[float, float, float]:
    return (min(values), mean(values), max(values)) if values else (float("nan"),) * 3


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return mean(known) if known else None


def lines(rows: list[dict], slo: Slo, alone: Alone) -> list[str]:
    """To read on a terminal 120 wide."""
    speeds = [
        f"{mean(found):.0f} tokens/s {where}"
        for found, where in ((alone.engine, "in an engine of its own"), (alone.server, "in S's"))
        if found
    ]
    said = [
        f"targets: TTFT P50 {1e3 * slo.ttft_p50:.0f} and P99 {1e3 * slo.ttft_p99:.0f} ms, TPOT P50 "
        f"{1e3 * slo.tpot_p50:.1f} and P99 {1e3 * slo.tpot_p99:.1f} ms; R alone: "
        f"{', '.join(speeds) or 'not measured'}",
        f"{'':18}{'requests':>9}{'aborted':>8} | {'TTFT ms':^15} | {'TPOT ms':^15} | "
        f"{'attain-':>8}{'good-':>7}"
        f"{'S':>6}",
        f"{'':18}{'':17} | {'P50':>7}{'P99':>8} | {'P50':>7}{'P99':>8} | "
        f"{'ment':>8}{'put/s':>7}{'busy':>6}",
    ]
    for row in rows:
        said.append(
            f"{row['scenario']:18}{row['requests']:9}{row['aborted']:8} | "
            f"{1e3 * row['ttft_p50']:7.1f}"
            f"{1e3 * row['ttft_p99']:8.1f} | "
            f"{1e3 * row['tpot_p50']:7.2f}{1e3 * row['tpot_p99']:8.2f} | "
            f"{100 * row['attainment']:7.2f}%{row['goodput']:7.2f}{100 * row['busy']:5.0f}%"
        )
    said += [
        "",
        "to S alone under the same traffic, mean (lowest..highest of the seeds); alone: to itself",
        f"{'':18}"
        + "".join(f"{name:>21}" for name in ("TTFT P50", "TTFT P99", "TPOT P50", "TPOT P99")),
    ]
    said += [
        f"{row['scenario']:18}"
        + "".join(f"{_range(row[f'{metric}_ratio']):>21}" for metric in METRICS)
        for row in rows
    ]
    said += [
        "",
        "the same, over the requests of all seeds together (95% of a bootstrap over blocks of "
        "requests)",
    ]
    said += [
        f"{row['scenario']:18}"
        + "".join(f"{_range(row[f'{metric}_pooled']):>21}" for metric in METRICS)
        for row in rows
        if row["scenario"] != ALONE
    ]
    said += [
        "",
        f"{'':18}{'rollout tok/s':>14}{'harvested of idle':>23}{'gate open':>11}{'evicted':>9}"
        f"{'wasted tok':>12}{'S preempted':>13}{'client late ms':>16}",
    ]
    for row in rows:
        harvested = (
            "-"
            if row["harvest"] is None
            else _range(tuple(100 * x for x in row["harvest"]), "%", 0)
        )
        opened = "-" if row["open"] is None else f"{100 * row['open']:.0f}%"
        said.append(
            f"{row['scenario']:18}{row['made']:14.0f}{harvested:>23}{opened:>11}{row['evicted']:9}"
            f"{row['wasted']:12}{row['preempted']:13}{1e3 * row['late_p99']:16.1f}"
        )
    return said


def _range(values: tuple[float, float, float], unit: str = "", digits: int = 2) -> str:
    low, middle, high = (f"{value:.{digits}f}" for value in values)
    return f"{middle}{unit} ({low}..{high})"


def targets(rows: list[dict]) -> list[str]:
    """Of the issue: met, not met, or in the noise: within the spread of S alone against itself,
    from which nothing can be told apart."""
    by, said = {row["scenario"]: row for row in rows}, []

    def say(what: str, met: bool, found: str, in_noise: bool = False) -> None:
        verdict = "met" if met else "in the noise" if in_noise else "NOT met"
        said.append(f"  {verdict:12}  {what}: {found}")

    alone = by[ALONE]
    if OURS in by:
        row = by[OURS]
        for metric, words in (("ttft_p99", "P99 TTFT"), ("tpot_p99", "P99 TPOT")):
            (_, middle, _), itself = row[f"{metric}_ratio"], alone[f"{metric}_ratio"]
            say(
                f"{OURS}: {words} within {LATENCY:.2f}x of S alone",
                middle <= LATENCY,
                f"{_range(row[f'{metric}_ratio'])}; S alone to itself {_range(itself)}",
                middle <= itself[2],
            )
        say(
            f"{OURS}: attainment no lower than S alone's",
            row["attainment"] >= alone["attainment"],
            f"{100 * row['attainment']:.2f}% and "
            f"{_range(tuple(100 * x for x in alone['attainments']), '%')}",
            row["attainment"] >= alone["attainments"][0],
        )
        say(
            f"{OURS}: {100 * HARVEST:.0f}% of the idle compute harvested",
            row["harvest"][1] >= HARVEST,
            _range(tuple(100 * x for x in row["harvest"]), "%", 0),
        )
    if NAIVE in by:
        worst = max(by[NAIVE][f"{metric}_ratio"][1] for metric in ("ttft_p99", "tpot_p99"))
        say(
            "naive co-location fails, or the load is too light",
            worst > FAILS,
            f"{worst:.2f}x at P99",
        )
    return said


def as_csv(rows: list[dict]) -> str:
    """The table with one number a cell: spreads become three columns."""
    flat = []
    for row in rows:
        cells = {}
        for name, value in row.items():
            if name.endswith(("_ratio", "_pooled")) or name in ("harvest", "attainments"):
                cells |= {
                    f"{name}_{end}": x
                    for end, x in zip(("low", "mean", "high"), value or ("", "", ""), strict=False)
                }
            else:
                cells[name] = "" if value is None else value
        flat.append(cells)
    text = io.StringIO()
    writer = csv.DictWriter(text, flat[0])
    writer.writeheader()
    writer.writerows(flat)
    return text.getvalue()
