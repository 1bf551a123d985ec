"""Turn rows of metrics.jsonl into the curves, bars and histograms of the report. Their size is
bounded, however long the run is."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from typing import Any

from rose.observe.series import mean_of

MAX_POINTS = 400  # points of a curve; a figure is 600 px wide and can't show more
MAX_BARS = 120  # bars of the figure of phases
MAX_BINS = 24  # bins of a histogram
CURVES = (
    "success",
    "reward_mean",
    "response_tokens_mean",
    "response_tokens_max",
    "turns_mean",
    "invalid_calls",
    "truncated",
    "tokens_per_s",
    "loss",
    "grad_norm",
    "lr",
    "entropy",
    "clip_fraction",
    "importance_capped",
    "mismatch_kl",
    "mismatch_max_ratio",
    "routing_differs",
    "reference_kl",
    "groups_equal",
    "staleness_mean",
    "staleness_max",
)
PHASES = ("rollout", "train", "sync", "idle")


def buckets(rows: list[dict[str, Any]], limit: int) -> list[list[dict[str, Any]]]:
    """Split the rows into at most `limit` groups of neighbours, all equally long except the
    last."""
    size = max(1, -(-len(rows) // limit))
    return [rows[i : i + size] for i in range(0, len(rows), size)]


def curves(steps: list[dict[str, Any]]) -> dict[str, Any]:
    """Return {"x": [...], name: [number or None, ...]} over the steps; in a long run, means of
    neighbours."""
    parts = buckets(steps, MAX_POINTS)
    found = {key: [mean_of(part, key) for part in parts] for key in CURVES}
    return {"x": [mean_of(part, "step") for part in parts]} | {
        key: values for key, values in found.items() if any(value is not None for value in values)
    }


def curves_by(steps: list[dict[str, Any]], key: str) -> dict[str, Any]:
    """Return a curve for each name in the keys `<key>/<name>`, such as tokens_per_s of each
    engine."""
    found = {each for row in steps for each in row if each.startswith(f"{key}/")}
    names = sorted(found, key=natural)
    parts = buckets(steps, max(50, min(MAX_POINTS, 40_000 // max(1, len(names)))))
    return {
        "x": [mean_of(part, "step") for part in parts],
        "names": [name.split("/", 1)[1] for name in names],
        "y": [[mean_of(part, name) for part in parts] for name in names],
    }


def phase_bars(steps: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the seconds of each phase for each step; in a long run, means of neighbours. `other`
    is the time that belongs to no phase."""
    bars = []
    for part in buckets(steps, MAX_BARS):
        bar = {phase: mean_of(part, f"time_{phase}") or 0.0 for phase in PHASES}
        bar["other"] = max(0.0, (mean_of(part, "time_step") or 0.0) - sum(bar.values()))
        bars.append(bar | {"first": part[0]["step"], "last": part[-1]["step"]})
    return bars if any(sum(bar[phase] for phase in (*PHASES, "other")) for bar in bars) else []


def length_histogram(steps: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the shares of responses per bin of lengths, for the first fifth of the steps and the
    last."""
    rows = [row for row in steps if row.get("response_hist")]
    if not rows:
        return None
    edges = _edges(rows)
    return {"edges": edges, "sides": _sides(rows, lambda side: _shares(side, edges))}


def value_histogram(steps: list[dict[str, Any]], key: str) -> dict[str, Any] | None:
    """Return the shares of trajectories per value, or per range of values if there are many, for
    the first fifth of the steps and the last. Rows have [value, count] pairs at `key`."""
    rows = [row for row in steps if row.get(key)]
    if not rows:
        return None
    values = sorted({value for row in rows for value, _ in row[key]})
    few = len(values) <= MAX_BINS
    edges = values if few else _parts(values)

    def shares(side: list[dict[str, Any]]) -> list[float]:
        counts = [0] * (len(edges) - (not few))
        for value, count in (pair for row in side for pair in row[key]):
            counts[min(bisect_right(edges, value), len(counts)) - 1] += count
        return [round(count / sum(counts), 5) for count in counts]

    bins = {"labels": [f"{value:.4g}" for value in values]} if few else {"edges": edges}
    return bins | {"sides": _sides(rows, shares)}


def _parts(values: list[float]) -> list[float]:
    """Return the edges of at most `MAX_BINS` equal parts of the range. If all values are whole
    numbers, so are the edges."""
    low, high = values[0], values[-1]
    if all(float(value).is_integer() for value in values):
        width = -(-int(high - low + 1) // MAX_BINS)
        return [low + width * i for i in range(int(high - low) // width + 2)]
    return [low + (high - low) * i / MAX_BINS for i in range(MAX_BINS + 1)]


def _sides(
    rows: list[dict[str, Any]], shares: Callable[[list[dict[str, Any]]], list[float]]
) -> list[dict[str, Any]]:
    """Return the shares of the first fifth of the rows and of the last, or of a single row."""
    fifth = max(1, len(rows) // 5)
    return [
        {"first": side[0]["step"], "last": side[-1]["step"], "shares": shares(side)}
        for side in ([rows[:fifth], rows[-fifth:]] if len(rows) > 1 else [rows])
    ]


def _edges(rows: list[dict[str, Any]]) -> list[float]:
    """Return the rows' own bin edges if they agree and are few; otherwise equal bins up to the
    largest edge."""
    own = {tuple(edge for edge, _ in row["response_hist"]) for row in rows}
    first = next(iter(own))
    if len(own) == 1 and len(first) <= MAX_BINS:
        return [0, *first]
    top = max(max(edges) for edges in own)
    return [round(top * i / MAX_BINS, 1) for i in range(MAX_BINS + 1)]


def _shares(rows: list[dict[str, Any]], edges: list[float]) -> list[float]:
    """Return the shares of all rows' counts per bin. A row's count is spread evenly over its own
    bin."""
    counts = [0.0] * (len(edges) - 1)
    for row in rows:
        low = 0.0
        for high, count in row["response_hist"]:
            for i in range(len(counts)):
                inside = min(high, edges[i + 1]) - max(low, edges[i])
                if inside > 0:
                    counts[i] += count * inside / (high - low)
            low = high
    total = sum(counts) or 1.0
    return [round(count / total, 5) for count in counts]


def natural(name: str) -> tuple[str, int]:
    """Return a sort key by which engine-10 comes after engine-9."""
    stem = name.rstrip("0123456789")
    return stem, int(name[len(stem) :] or 0)
