"""Write events of a run's ranks as tables of the report: faults, borrowed ranks that joined or
left, and reports of engines and environment hosts about themselves."""

from __future__ import annotations

import time
from html import escape
from typing import Any

from rose.parts.report.shell import table

MAX_ROWS = 200  # the latest events of a table


def borrowed(rows: list[dict[str, Any]], steps: list[dict[str, Any]]) -> str:
    """Return the tokens that borrowed ranks generated, then a table of the ranks that joined or
    left."""
    if not rows:
        return '<p class="empty">No serving rank joined this run.</p>'
    lent = made = 0.0
    for row in steps:
        seconds = (row.get("time_rollout") or 0) + (row.get("time_idle") or 0)
        tokens = (row.get("tokens_per_s") or 0) * seconds
        lent += tokens * (row.get("borrowed_token_share") or 0)
        made += tokens
    share = lent / made if made else 0.0
    return f"<p>They generated {share:.1%} of the rollout tokens.</p>" + listed(rows)


def faults(faults: list[dict[str, Any]], steps: list[dict[str, Any]]) -> str:
    """Return the steps' counters in one sentence, then a table of the faults with their times."""
    counted = (
        ("engine restarts", "engine_restarts"),
        ("turns continued on another engine", "migrations"),
        ("environment hosts lost", "hosts_lost"),
        ("trajectories that started again", "trajectories_restarted"),
        ("trajectories that moved to another host", "trajectories_moved"),
        ("... from a snapshot", "resumed_snapshots"),
        ("turns taken over", "resumed_turns"),
        ("of them returned by an engine that also serves users", "returned_turns"),
        ("trajectories failed and replaced", "failed_trajectories"),
        ("tasks given up", "failed_tasks"),
        ("invalid tool calls", "invalid_calls"),
        ("truncated responses", "truncated"),
    )
    # Rows have the total of the run so far for these, and the step's own count for the others.
    of_run = ("engine_restarts", "failed_trajectories", "failed_tasks")
    sums = {
        name: int((max if key in of_run else sum)([row.get(key) or 0 for row in steps] or [0]))
        for name, key in counted
    }
    text = "; ".join(f"{name} {count:,}" for name, count in sums.items())
    happened = listed(faults) or '<p class="empty">No fault was recorded.</p>'
    return f"<p>Over all steps: {text}.</p>{happened}"


def own_reports(title: str, first: str, rows: list[dict[str, Any]]) -> dict[str, str]:
    """Return a section of the reports of engines or environment hosts about themselves; {} without
    any. Ranks with the same report share a row. `first`: the first column's title."""
    found: dict[str, dict[str, None]] = {}
    for row in rows:
        found.setdefault(row["detail"], {})[row["what"]] = None
    cells = [
        [escape("; ".join(names)), escape(words).replace("\n", "<br>")]
        for words, names in found.items()
    ]
    return {title: table((first, "Has"), cells, listed=True)} if cells else {}


def listed(rows: list[dict[str, Any]]) -> str:
    """Return the latest events as a table; "" without any."""
    cells = [
        [
            time.strftime("%H:%M:%S", time.localtime(f["time"])),
            str(f["step"]),
            escape(str(f.get("what", ""))),
            escape(str(f.get("detail", ""))[:1000]),
        ]
        for f in rows[-MAX_ROWS:]
    ]
    more = len(rows) - MAX_ROWS
    note = f"<p class=muted>The {more:,} earlier ones are in metrics.jsonl.</p>" if more > 0 else ""
    return table(("Time", "Step", "What", "Detail"), cells, listed=True) + note
