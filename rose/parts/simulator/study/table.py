"""Writes outcomes as a table, as result.csv (a row per system and seed), and as result.json."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from rose.files import write_whole
from rose.parts.simulator.study.gains import Interval, gain
from rose.parts.simulator.study.outcome import (
    EVERY,
    Outcome,
    by_system,
    mean,
    metrics,
    shown,
    values,
)

CSV_COLUMNS = ("point", "system", "seed", *EVERY)


def gains(
    outcomes: Sequence[Outcome], ours: str, key: str = "step_s", better: int = -1
) -> dict[str, Interval]:
    """Return the factor by which `ours` is better than each other system, by default in step time.
    `better` is 1 if larger values are better, -1 if smaller values are."""
    systems = by_system(outcomes)
    mine = values(systems[ours], key)
    return {
        name: gain(mine, values(rows, key)) if better > 0 else gain(values(rows, key), mine)
        for name, rows in systems.items()
        if name != ours
    }


def words(found: Interval) -> str:
    """Return the interval as text, such as "1.31 [1.28, 1.34]"."""
    bounds = "" if math.isnan(found.low) else f" [{found.low:.2f}, {found.high:.2f}]"
    return f"{found.mean:.2f}{bounds}"


def table(outcomes: Sequence[Outcome], ours: str, title: str) -> Table:
    """Return a table with a row per system, ours last."""
    systems, found = by_system(outcomes), gains(outcomes, ours)
    made = Table(title=title, title_justify="left", header_style="bold")
    made.add_column("System")
    columns = metrics(outcomes)
    for metric in columns:
        made.add_column(metric.title, justify="right")
    made.add_column(f"{ours} is faster by [95%]", justify="right")
    for name in sorted(systems, key=lambda name: name == ours):
        rows = systems[name]
        made.add_row(
            name,
            *(shown(m, mean(rows, m.key)) for m in columns),
            words(found[name]) + " x" if name in found else "",
            style="bold" if name == ours else None,
        )
    return made


def write(folder: Path, outcomes: Sequence[Outcome], ours: str, about: dict[str, Any]) -> None:
    """Write result.csv and result.json of a comparison."""
    write_files(folder, outcomes, about | summary(outcomes, ours))


def write_files(folder: Path, outcomes: Sequence[Outcome], result: dict[str, Any]) -> None:
    """Write result.csv and result.json, each whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / "result.csv", csv_text(outcomes).encode())
    write_whole(folder / "result.json", (json.dumps(result, indent=2) + "\n").encode())


def csv_text(outcomes: Sequence[Outcome]) -> str:
    out = io.StringIO()
    rows = csv.writer(out, lineterminator="\n")
    rows.writerow(CSV_COLUMNS)
    rows.writerows([_plain(getattr(o, key)) for key in CSV_COLUMNS] for o in outcomes)
    return out.getvalue()


def _plain(value: Any) -> Any:
    """Round numbers to six digits, and replace NaN by an empty string."""
    if isinstance(value, float):
        return "" if math.isnan(value) else float(f"{value:.6g}")
    return value


def summary(outcomes: Sequence[Outcome], ours: str) -> dict[str, Any]:
    """Return {"system": ours, "seeds": [...], "systems": {name: {metric: mean}}, "gains": {name:
    {"mean", "low", "high"}}} with None for NaN."""
    systems = {
        name: {key: _plain(mean(rows, key)) for key in EVERY}
        for name, rows in by_system(outcomes).items()
    }
    found = {
        name: {field: _plain(value) for field, value in each._asdict().items()}
        for name, each in gains(outcomes, ours).items()
    }
    return _nulls(
        {
            "system": ours,
            "seeds": sorted({o.seed for o in outcomes}),
            "systems": systems,
            "gains": found,
        }
    )


def _nulls(tree: Any) -> Any:
    """Replace each empty string by None."""
    if isinstance(tree, dict):
        return {key: _nulls(value) for key, value in tree.items()}
    return None if tree == "" else tree
