"""The report's table of a mixture: what each environment learned. A run with one environment has
none."""

from __future__ import annotations

from html import escape
from typing import Any

from rose.observe import series

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
    """`evals` and `steps` are rows of metrics.jsonl. Means are over the last fifth of the steps,
    each counted alike."""
    names = sorted(
        {
            key.split("/", 1)[1]
            for row in (*evals, *steps)
            for key in row
            if key.startswith(("eval_n/", "trajectories/"))
        }
    )
    if not names:
        return ""
    head = "".join(f"<th scope=col>{title}</th>" for title in TITLES)
    body = "".join(
        f"<tr><th scope=row>{escape(name)}</th>{_cells(name, evals, steps)}</tr>" for name in names
    )
    return (
        "<p>By environment; success to response tokens are of the training episodes of the last "
        "fifth of the steps.</p><div "
        f"class=scroll><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _cells(name: str, evals: list[dict[str, Any]], steps: list[dict[str, Any]]) -> str:
    last = steps[-max(1, len(steps) // 5) :]
    means = [(series.mean_of(last, f"{key}/{name}"), form) for key, form in COLUMNS]
    held_out = series.evaluations([_of(name, row) for row in evals])
    words = [
        f"{sum(row.get(f'trajectories/{name}') or 0 for row in steps):,}",
        *("–" if value is None else form.format(value) for value, form in means),
        _rate(held_out[:1]),
        _rate(held_out[1:][-1:]),
    ]
    return "".join(f"<td>{word}</td>" for word in words)


def _of(name: str, row: dict[str, Any]) -> dict[str, Any]:
    """An evaluation's row as if it had this member's tasks alone."""
    return {"step": row["step"]} | {
        key.rpartition("/")[0]: value for key, value in row.items() if key.endswith(f"/{name}")
    }


def _rate(found: list[dict[str, Any]]) -> str:
    """With its Wilson 95% interval; of at most one evaluation."""
    return (
        "".join(
            f"{e['rate']:.1%} ({e['low']:.0%} to {e['high']:.0%}, {e['successes']} of {e['n']})"
            for e in found
        )
        or "–"
    )
