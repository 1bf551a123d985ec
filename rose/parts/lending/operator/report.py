"""The lending report: what serving attained and what training gained, in one page that opens
offline.

Its numbers come from the history of the boards. Latencies come from the online server's own
histograms. These cover all its requests since its last start, whether anything was lent or not.
Style and charts are those of the training report (rose/parts/report).
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from html import escape
from importlib.resources import files
from typing import Any, NamedTuple

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from rose.parts.lending.config import Serving, Slo
from rose.parts.lending.operator.history import History
from rose.parts.report import shell
from rose.parts.report.shell import figure, figures, milliseconds, section, table

GIB = 2**30
LATENCIES = {
    "ttft": ("Time to first token", "vllm:time_to_first_token_seconds"),
    "tpot": ("Time per output token", "vllm:request_time_per_output_token_seconds"),
}
QUANTILES = {"p50": 0.5, "p99": 0.99}
MOST_POINTS = 600  # most points of a curve


class Event(NamedTuple):
    """A line in the report's list of events."""

    at: float  # unix seconds
    text: str


def quantiles(metrics: str) -> dict[str, float]:
    """Compute {"ttft_p50_s": seconds, ...} from the text of vLLM's /metrics. Interpolates within a
    bucket, as Prometheus does. Empty histograms are left out."""
    buckets: dict[str, dict[float, float]] = {}
    for family in text_string_to_metric_families(metrics):
        for sample in family.samples:
            if sample.name.endswith("_bucket"):
                counts = buckets.setdefault(sample.name.removesuffix("_bucket"), {})
                edge = float(sample.labels["le"])
                counts[edge] = counts.get(edge, 0.0) + sample.value
    found = {}
    for latency, (_, name) in LATENCIES.items():
        for quantile, share in QUANTILES.items():
            if (seconds := _quantile(sorted(buckets.get(name, {}).items()), share)) is not None:
                found[f"{latency}_{quantile}_s"] = seconds
    return found


def _quantile(edges: list[tuple[float, float]], share: float) -> float | None:
    """Compute the quantile `share` of a histogram with cumulative (upper edge, count). At most the
    last finite edge; None if the histogram is empty."""
    total = edges[-1][1] if edges else 0.0
    if not total:
        return None
    low = below = 0.0
    for edge, count in edges:
        if edge == float("inf"):
            break
        if count >= share * total:
            return low + (edge - low) * (share * total - below) / (count - below)
        low, below = edge, count
    return low


def page(
    title: str,
    serving: Serving,
    history: History,
    measured: dict[str, float],
    stopped: str,
    events: Iterable[Event],
) -> str:
    """Create the page's HTML. `measured` is the result of `quantiles`. `stopped` is the reason why
    nothing is lent now, or ""."""
    totals = history.totals()
    now = f" · nothing is lent now: {stopped}" if stopped else ""
    data = {"x": _thin([t / 60 for t in history.rows["t"]]), "curves": _curves(history)}
    name = serving.online.served_name or serving.online.model
    subtitle = escape(f"{name} · {time.strftime('%-d %B %Y, %H:%M')}{now}")
    kept = _kept(serving.online.slo, measured, totals) + figures("attainment", "requests")
    sections = {
        "What serving kept": kept,
        "What was lent": _lent(totals) + figure("tokens") + figures("gate", "losses"),
        "Memory": figure("memory"),
        "Events": _events(events),
    }
    body = "\n\n".join(section(name, content) for name, content in sections.items())
    script = (files("rose.parts.lending.operator") / "page" / "lending.js").read_text(
        encoding="utf-8"
    )
    facts = _facts(history, totals)
    return shell.page("lending", title, subtitle, facts, body, data, [script])


def summary(
    title: str, measured: dict[str, float], slo: Slo | None, history: History, stopped: str
) -> dict[str, Any]:
    """Summarize lending for the training run's report (rose/parts/lending/run_report.py). The
    summary has (met, finished) requests with and without lending, measured latencies and targets in
    seconds, and the tokens that lent compute generated and wasted."""
    totals = history.totals()
    return {
        "device": title,
        "time": time.time(),
        "attained": _attained(totals),
        "measured": measured,
        "slo": {} if slo is None else msgspec.to_builtins(slo),
        "made_tokens": totals["rollout.made_tokens"],
        "wasted_tokens": totals["rollout.wasted_tokens"],
        "evicted": totals["rollout.evicted"],
        "preempted": totals["online.preempted"],
        "stopped": stopped,
    }


def _attained(totals: dict[str, float]) -> dict[str, tuple[float, float]]:
    """Count requests that met both P99 targets and all that finished, as `metrics.attainment`."""
    met, finished = totals["online.met_lending"], totals["online.finished_lending"]
    return {
        "with": (met, finished),
        "without": (totals["online.met"] - met, totals["online.finished"] - finished),
    }


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.1%}" if whole else "–"


def _facts(history: History, totals: dict[str, float]) -> list[tuple[str, str]]:
    """Return the (title, value)s at the top of the page."""
    minutes = (history.rows["t"] or [0.0])[-1] / 60
    attained, opened = _attained(totals), totals["rollout.open_s"]
    return [
        ("Time", f"{minutes:.0f} min" if minutes >= 1 else f"{60 * minutes:.0f} s"),
        ("Online requests", f"{totals['online.finished']:,.0f}"),
        ("SLO attainment, lending", _share(*attained["with"])),
        ("SLO attainment, otherwise", _share(*attained["without"])),
        ("Tokens generated by lent compute", f"{totals['rollout.made_tokens']:,.0f}"),
        ("Gate open", _share(opened, opened + totals["rollout.shut_s"])),
    ]


def _kept(slo: Slo | None, measured: dict[str, float], totals: dict[str, float]) -> str:
    """Return the section on latencies and targets of online requests."""
    rows = []
    for latency, (name, _) in LATENCIES.items():
        for quantile in QUANTILES:
            key = f"{latency}_{quantile}_s"
            target, now = getattr(slo, key) if slo else None, measured.get(key)
            verdict = "–"
            if target is not None and now is not None:
                verdict = "met" if now <= target else "<b>missed</b>"
            shown = (milliseconds(target), milliseconds(now))
            rows.append([f"{name}, {quantile.upper()}", *shown, verdict])
    labels = {"with": "While rollouts ran", "without": "Otherwise"}
    by_lending = [
        [labels[key], f"{finished:,.0f}", f"{met:,.0f}", _share(met, finished)]
        for key, (met, finished) in _attained(totals).items()
    ]
    head = ("Online requests", "Finished", "Within both P99 targets", "Attainment")
    return (
        table(("Latency", "Target", "Measured", ""), rows)
        + "<p class=muted>Measured by the online server over all requests since its last start, "
        "within the width of its histogram's buckets.</p>"
        + table(head, by_lending)
        + f"<p>Aborted: {totals['online.aborted']:,.0f}. Running requests that lost their memory: "
        f"{totals['online.preempted']:,.0f}.</p>"
    )


def _lent(t: dict[str, float]) -> str:
    """Return the table of the work that lent compute did for rollouts."""
    computed = t["rollout.prompt_tokens"] + t["rollout.made_tokens"]
    wasted = t["rollout.wasted_tokens"]
    rows = [
        ["Tokens generated", f"{t['rollout.made_tokens']:,.0f}"],
        ["Prompt tokens computed", f"{t['rollout.prompt_tokens']:,.0f}"],
        ["Time in rollout steps", f"{t['rollout.busy_s']:,.0f} s"],
        ["Requests evicted", f"{t['rollout.evicted']:,.0f}"],
        ["Their tokens, computed again elsewhere", f"{wasted:,.0f} ({_share(wasted, computed)})"],
    ]
    return table(("Lent", ""), rows)


def _events(events: Iterable[Event]) -> str:
    rows = [(time.strftime("%H:%M:%S", time.localtime(e.at)), escape(e.text)) for e in events]
    return table(("Time", "What"), rows, listed=True) or '<p class="empty">Nothing happened.</p>'


def _thin(values: list[Any]) -> list[Any]:
    """Keep every nth value, at most MOST_POINTS of them, the last one included. From lists of equal
    length the same positions are kept."""
    stride = -(-len(values) // MOST_POINTS) or 1
    return values[::-1][::stride][::-1]


def _curves(history: History) -> dict[str, list[float | None]]:
    """Return the points of each curve of the page's charts, by the curve's name."""
    rows = {name: _thin(values) for name, values in history.rows.items()}

    def rate(name: str) -> list[float | None]:
        return _ratio(_increments(rows[name]), _increments(rows["t"]))

    with_, finished_with = rows["online.met_lending"], rows["online.finished_lending"]
    opened, shut = _increments(rows["rollout.open_s"]), _increments(rows["rollout.shut_s"])
    memory = {
        "held": "online.kv_held",
        "used": "online.kv_used",
        "budget": "rollout.kv_budget",
        "rollout_used": "rollout.kv_used",
    }
    gib = {name: [value / GIB for value in rows[key]] for name, key in memory.items()}
    return {
        "attained_with": _ratio(with_, finished_with),
        "attained_without": _ratio(
            _minus(rows["online.met"], with_), _minus(rows["online.finished"], finished_with)
        ),
        "online": rows["online.running"],
        "rollout": rows["rollout.running"],
        "prompt_rate": rate("rollout.prompt_tokens"),
        "made_rate": rate("rollout.made_tokens"),
        "gate": _ratio(opened, [a + b for a, b in zip(opened, shut, strict=False)]),
        "evicted": rows["rollout.evicted"],
    } | gib


def _increments(values: list[float]) -> list[float]:
    """Return by how much each value exceeds the value before it; the first value exceeds 0."""
    return [b - a for a, b in zip([0.0, *values], values, strict=False)]


def _minus(a: list[float], b: list[float]) -> list[float]:
    return [x - y for x, y in zip(a, b, strict=False)]


def _ratio(above: list[float], below: list[float]) -> list[float | None]:
    return [x / y if y > 0 else None for x, y in zip(above, below, strict=False)]
