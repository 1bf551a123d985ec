"""The serving side of a run's report: what each device that lent to it kept for its own users, and
what it lent.

The operator's process beside an online server (rose/lending/operator/operate.py) leaves `lent.json`
and a page of its own in OUTPUT_DIR/serving/RUN-HOST-N; here they are found and told. Left out:
ranks without an online server beside them.
"""

from __future__ import annotations

import glob
import json
import time
from html import escape
from pathlib import Path
from typing import Any

LENT = "lent.json"
LATENCIES = (
    ("ttft_p50_s", "TTFT P50"),
    ("ttft_p99_s", "TTFT P99"),
    ("tpot_p50_s", "TPOT P50"),
    ("tpot_p99_s", "TPOT P99"),
)


def read(run_dir: Path) -> list[tuple[Path, dict[str, Any]]]:
    """(folder, what `rose.lending.operator.report.summary` said) of each device that served a run
    of this name."""
    run_dir = Path(run_dir).resolve()
    found = []
    for path in sorted((run_dir.parent / "serving").glob(f"{glob.escape(run_dir.name)}-*/{LENT}")):
        try:
            found.append((path.parent, json.loads(path.read_text())))
        except (OSError, ValueError):
            # it is being written, or is somebody else's: a report is made of what there is
            continue
    return found


def html(run_dir: Path) -> str:
    """A table, "" without any such device."""
    rows = "".join(_row(Path(run_dir).resolve(), folder, told) for folder, told in read(run_dir))
    if not rows:
        return ""
    titles = "".join(
        f"<th scope=col>{name}</th>"
        for name in (
            "Online server beside a lent engine",
            "Attainment while lending",
            "otherwise",
            *(name for _, name in LATENCIES),
            "Preempted",
            "Tokens lent",
            "Handed back",
        )
    )
    return (
        "<h3>What serving kept</h3><div "
        f"class=scroll><table><thead><tr>{titles}</tr></thead><tbody>{rows}</tbody></table></div><p "
        "class=muted>Attainment: online requests within both P99 targets. Latencies: measured, and "
        "the target. A server may have served longer than this run lasted.</p>"
    )


def _row(run_dir: Path, folder: Path, told: dict[str, Any]) -> str:
    link = escape(f"../{folder.relative_to(run_dir.parent)}/report.html", quote=True)
    at = time.strftime("%H:%M", time.localtime(told["time"]))
    cells = [_share(*told["attained"]["with"]), _share(*told["attained"]["without"])]
    for key, _ in LATENCIES:
        measured, target = told["measured"].get(key), told["slo"].get(key)
        cells.append(f"{_ms(measured)} <span class=muted>of {_ms(target)}</span>")
    cells += [f"{told['preempted']:,.0f}", f"{told['made_tokens']:,.0f}", f"{told['evicted']:,.0f}"]
    return (
        f'<tr><th scope=row><a href="{link}">{escape(told["device"])}</a> <span '
        f"class=muted>{at}</span></th>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"
    )


def _share(met: float, finished: float) -> str:
    return f"{met / finished:.1%} <span class=muted>of {finished:,.0f}</span>" if finished else "–"


def _ms(seconds: float | None) -> str:
    return (
        "–"
        if seconds is None
        else f"{1000 * seconds:,.0f} ms"
        if seconds >= 0.01
        else f"{1000 * seconds:.1f} ms"
    )
