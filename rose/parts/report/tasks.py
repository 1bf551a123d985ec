"""Show, in a section of the report, how often each task was solved: in the first and the second
half of the training steps and in the last held-out evaluation."""

from __future__ import annotations

from html import escape
from typing import Any

from rose.parts.report.shell import table

MAX_TASKS = 200  # tasks in the table: those that were solved least often
Row = dict[str, Any]
Counts = dict[str, tuple[int, int]]  # a task's name -> (how often it was solved, and tried)


def html(steps: list[Row], evals: list[Row]) -> str:
    """Return the table; "" if the environment names no tasks. `evals`: the rows of held-out
    evaluations, in order."""
    half = (len(steps) + 1) // 2
    parts = [_sum(steps[:half], "task_successes"), _sum(steps[half:], "task_successes")]
    parts.append(_sum(evals[-1:], "eval_task_successes"))
    names = sorted({name for part in parts for name in part}, key=lambda name: _rate(parts, name))
    rows = [
        [escape(name), *(_solved(part.get(name)) for part in parts)] for name in names[:MAX_TASKS]
    ]
    titles = ("Task", "First half of training", "Last half", "Last held-out evaluation")
    left = len(names) - MAX_TASKS
    more = f"; {left:,} more tasks are in metrics.jsonl" if left > 0 else ""
    note = (
        "<p class=muted>Solved of tried, of the trajectories that were trained; the least solved "
        f"first{more}.</p>"
    )
    return note + table(titles, rows) if rows else ""


def _sum(rows: list[Row], key: str) -> Counts:
    """Return the counts at `key`, summed over the rows."""
    found: Counts = {}
    for row in rows:
        for name, (solved, tried) in (row.get(key) or {}).items():
            before = found.get(name, (0, 0))
            found[name] = before[0] + solved, before[1] + tried
    return found


def _rate(parts: list[Counts], name: str) -> tuple[float, str]:
    """Return a sort key for tasks: the share of all tries that solved the task, then its name."""
    counts = [part.get(name, (0, 0)) for part in parts]
    return sum(solved for solved, _ in counts) / max(1, sum(tried for _, tried in counts)), name


def _solved(counts: tuple[int, int] | None) -> str:
    return f"{counts[0]:,} of {counts[1]:,}" if counts else "–"
