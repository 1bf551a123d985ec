"""Show the results of each environment of a mixture, as a table of the report. A run with a single
environment has no such table."""

from __future__ import annotations

from html import escape
from typing import Any

from rose.observe import series
from rose.parts.report import shell

COLUMNS = (
    ("success", "{:.1%}"),
    ("reward_mean", "{:.3f}"),
    ("turns_mean", "{:.1f}"),
    ("response_tokens_mean", "{:.0f}"),
)
TITLES = (
    "Environment",
    "Trajectories",
    "Success",
    "Reward",
    "Turns",
    "Response tokens",
    "Held-out before",
    "Held-out after",
)


def html(evals: list[dict[str, Any]], steps: list[dict[str, Any]]) -> str:
    """Return the table. `evals` and `steps` are rows of metrics.jsonl. Means are over the last
    fifth of the steps, and each step has the same weight."""
    keys = {key for row in (*evals, *steps) for key in row}
    found = sorted(key for key in keys if key.startswith(("eval_n/", "trajectories/")))
    names = sorted({key.split("/", 1)[1] for key in found})
    if not names:
        return ""
    return (
        "<p>By environment; success to response tokens are of the training episodes of the last "
        "fifth of the steps.</p>"
    ) + shell.table(TITLES, [[escape(name), *_cells(name, evals, steps)] for name in names])


def _cells(name: str, evals: list[dict[str, Any]], steps: list[dict[str, Any]]) -> list[str]:
    last = steps[-max(1, len(steps) // 5) :]
    means = [(series.mean_of(last, f"{key}/{name}"), form) for key, form in COLUMNS]
    held_out = series.evaluations([_row_of(name, row) for row in evals])
    return [
        f"{sum(row.get(f'trajectories/{name}') or 0 for row in steps):,}",
        *("–" if value is None else form.format(value) for value, form in means),
        _rate(held_out[:1]),
        _rate(held_out[1:][-1:]),
    ]


def _row_of(name: str, row: dict[str, Any]) -> dict[str, Any]:
    """Return an evaluation's row as if it had only the tasks of the environment `name`."""
    return {"step": row["step"]} | {
        key.rpartition("/")[0]: value for key, value in row.items() if key.endswith(f"/{name}")
    }


def _rate(found: list[dict[str, Any]]) -> str:
    """Return the success rate of at most one evaluation, with its Wilson 95% interval."""
    if not found:
        return "–"
    e = found[0]
    return f"{e['rate']:.1%} ({e['low']:.0%} to {e['high']:.0%}, {e['successes']} of {e['n']})"
