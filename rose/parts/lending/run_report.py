"""The serving side in a run's report: for each lending device, the latencies that its users got and
the tokens that it lent.

The operator's process beside an online server (rose/parts/lending/operator/operate.py) writes
`lent.json` and its own page into OUTPUT_DIR/serving/RUN-HOST-N. Ranks without an online server
beside them are not shown.
"""

from __future__ import annotations

import glob
import json
import time
from contextlib import suppress
from html import escape
from pathlib import Path
from typing import Any

from rose.parts.report.shell import milliseconds, table

LENT = "lent.json"
LATENCIES = {
    "ttft_p50_s": "TTFT P50",
    "ttft_p99_s": "TTFT P99",
    "tpot_p50_s": "TPOT P50",
    "tpot_p99_s": "TPOT P99",
}


def read(run_dir: Path) -> list[tuple[Path, dict[str, Any]]]:
    """Return (folder, `operator.report.summary`) for each device that lent itself to this run."""
    run_dir = Path(run_dir).resolve()
    found = []
    for path in sorted((run_dir.parent / "serving").glob(f"{glob.escape(run_dir.name)}-*/{LENT}")):
        # A damaged or unreadable file is left out. `_row` raises an error if a value is missing.
        with suppress(OSError, ValueError, KeyError, TypeError):
            summary = json.loads(path.read_text(encoding="utf-8"))
            _row(run_dir, path.parent, summary)
            if summary["run"] == run_dir.name:  # The pattern for `lake` also finds `lake-2`.
                found.append((path.parent, summary))
    return found


def html(run_dir: Path) -> str:
    """Return a table with a row for each device that lent itself to the run; "" if none did."""
    rows = [_row(Path(run_dir).resolve(), folder, summary) for folder, summary in read(run_dir)]
    if not rows:
        return ""
    begin = ("Online server beside a borrowed engine", "Attainment while lending", "otherwise")
    titles = (*begin, *LATENCIES.values(), "Preempted", "Tokens lent", "Handed back")
    return f"<h3>What serving kept</h3>{table(titles, rows)}" + (
        "<p class=muted>Attainment: online requests within both P99 targets. Latencies: measured, "
        "and the target. A server may have served longer than this run lasted.</p>"
    )


def _row(run_dir: Path, folder: Path, summary: dict[str, Any]) -> list[str]:
    """Return the cells of a device's row in the table of `html`."""
    link = escape(f"../{folder.relative_to(run_dir.parent)}/report.html", quote=True)
    at = time.strftime("%H:%M", time.localtime(summary["time"]))
    cells = [f'<a href="{link}">{escape(summary["device"])}</a> <span class=muted>{at}</span>']
    cells += [_share(*summary["attained"][when]) for when in ("with", "without")]
    for key in LATENCIES:
        measured, target = summary["measured"].get(key), summary["slo"].get(key)
        cells.append(f"{milliseconds(measured)} <span class=muted>of {milliseconds(target)}</span>")
    return cells + [f"{summary[key]:,.0f}" for key in ("preempted", "made_tokens", "evicted")]


def _share(met: float, finished: float) -> str:
    return f"{met / finished:.1%} <span class=muted>of {finished:,.0f}</span>" if finished else "–"
