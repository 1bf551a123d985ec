"""Writes the pages: outputs/NAME/report.html of one comparison, and outputs/NAME-sweep.html of the
points of a sweep.

Shell, style and chart functions are those of the training report (rose/parts/report).
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

import msgspec

from rose.files import write_whole
from rose.parts.report import shell
from rose.parts.report.shell import figure, figures, section
from rose.parts.simulator.config import Config
from rose.parts.simulator.study import build
from rose.parts.simulator.study.gains import Interval
from rose.parts.simulator.study.outcome import Outcome, by_system, mean, metrics, shown
from rose.parts.simulator.study.table import gains, words

GAIN_WORDS = (
    "of {ours} over each system: ratio of the step times, geometric mean and 95% interval over {n} "
    "seeds."
)


def report(path: Path, c: Config, outcomes: Sequence[Outcome], command: str) -> None:
    """Write the page that compares the systems of one configuration."""
    label = c.sim.label
    data = {
        "ours": label,
        "seed": c.sim.seeds[0],
        "gains": _gain_rows(gains(outcomes, label)),
        "gainWords": GAIN_WORDS.format(ours=label, n=len(c.sim.seeds)),
        "phases": _phases(outcomes),
        "pictures": {o.system: o.picture for o in outcomes if o.picture is not None},
    }
    serving = any(o.picture and o.picture.serving for o in outcomes)
    sections = [
        section("Result", _table(outcomes, label) + figure("gains")),
        section("Where the time goes", figure("phases") + figure("timeline")),
        section(
            "Online serving",
            figures("load", "slo")
            if serving
            else '<p class="empty">No system borrowed devices of an online service.</p>',
        ),
        section("Systems", _systems(c)),
        section("Details", _details(command, c)),
    ]
    _write(path, c.name, _subtitle(c), _facts(c, outcomes), sections, data)


def sweep(
    path: Path,
    title: str,
    axis: str,
    labels: dict[str, str],
    outcomes: Sequence[Outcome],
    command: str,
) -> None:
    """Write the page that compares the points of a sweep with its first point. `labels` has each
    point's configured system."""
    points = list(labels)
    names = {point: _short(point, title) for point in points}
    mine = [
        msgspec.structs.replace(o, system=names[o.point])
        for o in outcomes
        if o.system == labels[o.point]
    ]
    first = names[points[0]]
    found = {
        name: Interval(1 / g.mean, 1 / g.high, 1 / g.low) for name, g in gains(mine, first).items()
    }
    data: dict[str, Any] = {
        "ours": first,
        "seed": mine[0].seed,
        "gains": _gain_rows(found),
        "phases": _phases(mine),
        "gainWords": f"of each point over {first}: ratio of the step times, geometric mean and "
        f"95% interval over {len({o.seed for o in mine})} seeds.",
        "pictures": {o.system: o.picture for o in mine if o.picture is not None},
    }
    numbers = _numbers(points)
    drawn = figure("gains")
    if numbers:
        data["sweep"] = {"x": numbers, "axis": axis, "systems": _curves(points, outcomes)}
        drawn += figures("sweep-step", "sweep-rate")
    sections = [
        section("Result", _table(mine, first, "×, than " + first, found) + drawn),
        section("Where the time goes", figure("phases") + figure("timeline")),
        section(
            "Details",
            f"<pre>{escape(command)}</pre><p>Each point's own report: {_links(points)}.</p>",
        ),
    ]
    _write(
        path,
        title,
        f"{len(points)} points of a sweep over {escape(axis)}; "
        f"{', '.join(escape(label) for label in dict.fromkeys(labels.values()))}",
        [],
        sections,
        data,
    )


def plan(path: Path, c: Config, answer: Any, command: str) -> None:
    """Write the page of mode=plan. `answer` is a rose.parts.simulator.study.sizing.Answer."""
    pairs = sorted(answer.pairs, key=lambda pair: (pair.price, pair.step_s.mean))
    body = "".join(
        f"<tr{' class=ours' if pair is answer.advised else ''}><th "
        f"scope=row>{pair.words}</th><td>{pair.price:.1f}</td>"
        f"<td>{words(pair.step_s)}</td><td>{pair.share('rollout_s'):.0%}</td><td>{pair.share('train_s'):.0%}</td>"
        f"<td>{'yes' if pair.step_s.mean <= answer.target_s else 'no'}</td></tr>"
        for pair in pairs
    )
    head = "".join(
        f"<th scope=col>{title}</th>"
        for title in (
            "GPUs",
            "Price, dedicated GPUs",
            "Step, s [95%]",
            "Rollout",
            "Training",
            "Reaches the target",
        )
    )
    reasons = "".join(f"<li>{escape(reason)}</li>" for reason in answer.reasons)
    borrowed = sorted({pair.borrowed for pair in pairs})
    at = {(pair.dedicated, pair.borrowed): pair.step_s.mean for pair in pairs}
    curves = [
        {"name": f"{own} dedicated", "step_s": [at.get((own, lent)) for lent in borrowed]}
        for own in sorted({pair.dedicated for pair in pairs})
    ]
    data = {
        "ours": "",
        "gains": [],
        "phases": [],
        "pictures": {},
        "sweep": {"x": borrowed, "axis": "borrowed GPUs", "systems": curves},
    }
    sections = [
        section("Answer", f"<ul>{reasons}</ul>"),
        section(
            "Trade-off",
            f"<div class=scroll><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody>"
            "</table></div>" + figure("sweep-step"),
        ),
        section("Details", _details(command, c)),
    ]
    _write(
        path, c.name, _subtitle(c), [("Target", f"{answer.target_s:.1f} s a step")], sections, data
    )


def _write(
    path: Path,
    title: str,
    subtitle: str,
    facts: list[tuple[str, str]],
    sections: list[str],
    data: dict[str, Any],
) -> None:
    """Write a page with these sections. Its script draws the figures from `data`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    html = shell.page(
        "simulation",
        title,
        subtitle,
        facts,
        "\n\n".join(sections),
        data,
        [(files("rose.parts.simulator.study") / "page" / "study.js").read_text(encoding="utf-8")],
    )
    write_whole(path, html.encode())


def _subtitle(c: Config) -> str:
    words_ = [
        c.model.name,
        " + ".join(c.sim.environment.domains),
        f"batch {c.trainer.batch_size} in groups of {c.rollout.group_size}",
        f"{c.trainer.ranks} GPUs to train",
    ]
    return " · ".join(escape(word) for word in words_)


def _facts(c: Config, outcomes: Sequence[Outcome]) -> list[tuple[str, str]]:
    mine = by_system(outcomes)[c.sim.label]
    return [
        ("System", c.sim.label),
        ("Step", f"{mean(mine, 'step_s'):.1f} s"),
        ("Steps per hour", f"{3600 / mean(mine, 'step_s'):.1f}"),
        ("Seeds", str(len(c.sim.seeds))),
        ("Steps simulated", f"{c.sim.steps} each, {c.sim.warmup} to warm up"),
    ]


def _gain_rows(found: dict[str, Interval]) -> list[dict[str, Any]]:
    """Return the gains as data for their figure."""
    return [
        {"name": name, "mean": g.mean}
        | {key: None if math.isnan(v) else v for key, v in (("low", g.low), ("high", g.high))}
        for name, g in found.items()
    ]


def _phases(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """Return the parts of each system's mean step. If training overlaps with rollout, the parts are
    together longer than the step, and are scaled down to it."""
    rows = []
    for name, each in by_system(outcomes).items():
        parts = {key: mean(each, f"{key}_s") for key in ("rollout", "train", "sync")}
        total = mean(each, "step_s")
        scale = min(1.0, total / (sum(parts.values()) or 1.0))
        parts = {key: value * scale for key, value in parts.items()}
        rows.append(
            {"name": name, "total": total, "idle": max(0.0, total - sum(parts.values()))} | parts
        )
    return rows


def _table(
    outcomes: Sequence[Outcome],
    label: str,
    gain_title: str = "",
    found: dict[str, Interval] | None = None,
) -> str:
    """Return the HTML table of the systems' metrics and gains (by default those of `label`)."""
    gain_title, found = gain_title or f"{label} is faster, ×", found or gains(outcomes, label)
    columns = metrics(outcomes)
    head = "".join(
        f"<th scope=col>{escape(title)}</th>"
        for title in ("System", *(m.title for m in columns), gain_title)
    )
    body = ""
    for name, rows in by_system(outcomes).items():
        cells = "".join(f"<td>{shown(m, mean(rows, m.key))}</td>" for m in columns)
        body += (
            f"<tr{' class=ours' if name == label else ''}><th scope=row>{escape(name)}</th>{cells}"
            f"<td>{words(found[name]) if name in found else ''}</td></tr>"
        )
    return (
        "<div "
        f"class=scroll><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div><p "
        "class=muted>Means over the seeds; times and rates of steps, staleness and hidden training "
        "after the warm-up, all others over the whole run. Trained/s: trajectories. Staleness: "
        "versions. p99/p50: of the trajectories' times. SLO kept: share of online requests within "
        "both P99 targets (the target is 99%). Allocation: share of the borrowed workers' time "
        "before they were ready.</p>"
    )


def _systems(c: Config) -> str:
    """Return the HTML table that describes the compared systems."""
    kinds = ("provisioning", "routing", "order", "batching")
    head = "".join(
        f"<th scope=col>{title}</th>" for title in ("System", "What it is", *kinds, "Pools")
    )
    body = ""
    for name, each in build.systems(c).items():
        policies = "".join(
            f"<td>{escape(getattr(each.scheduler, kind).name)}</td>" for kind in kinds
        )
        body += (
            f"<tr><th scope=row>{escape(name)}</th><td "
            f"class=text>{escape(each.about)}</td>{policies}"
            f"<td>{escape(', '.join(each.pools))}</td></tr>"
        )
    return (
        "<div class=scroll><table "
        f"class=list><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _details(command: str, c: Config) -> str:
    tree = json.dumps(msgspec.to_builtins(c), indent=2, ensure_ascii=False)
    return (
        f"<pre>{escape(command)}</pre><details><summary>Resolved "
        f"configuration</summary><pre>{escape(tree)}</pre>"
        "</details>"
    )


def _short(point: str, title: str) -> str:
    """Return a point's name without the sweep's."""
    return point.removeprefix(title).lstrip("-") or point


def _numbers(points: Sequence[str]) -> list[float]:
    """Return the values of the swept key; [] unless there is one key with ascending numbers."""
    try:
        found = [float(point.rsplit("=", 1)[1]) for point in points]
    except (IndexError, ValueError):
        return []
    keys = {point.rsplit("=", 1)[0] for point in points}
    return found if len(keys) == 1 and len(found) > 1 and found == sorted(found) else []


def _curves(points: Sequence[str], outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """Return each system's step time and throughput at every point; None without an outcome."""
    names = list(by_system(outcomes))
    at = {(o.point, o.system): [] for o in outcomes}
    for o in outcomes:
        at[o.point, o.system].append(o)
    return [
        {"name": name}
        | {
            key: [mean(at[point, name], key) if (point, name) in at else None for point in points]
            for key in ("step_s", "trajectories_s")
        }
        for name in names
    ]


def _links(points: Sequence[str]) -> str:
    return ", ".join(
        f'<a href="{escape(point)}/report.html">{escape(point)}</a>' for point in points
    )
