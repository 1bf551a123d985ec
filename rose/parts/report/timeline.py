"""Turn the run's events into the report's timeline: the work of each rank over time, small enough
for one HTML file.

Rows are the coordinator's phases, the trainers and the engines. The number of running turns of each
engine covers the whole run. Single turns are kept for as many whole steps as fit into the budget
(the Perfetto trace has all of them).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from rose.observe.recorder import RankEvents, read_events
from rose.parts.report.curves import natural
from rose.parts.report.trace import Span, assign_lanes, spans_of

MAX_MARKS = 20_000  # single spans, at about 60 bytes each: 1.2 MB of the report
MAX_ROWS = 300  # ranks
MAX_STEPS = 5_000  # steps in the page's list; a longer run lists only those with single turns
OCCUPANCY_NUMBERS = 120_000  # points of all engines' curves of running turns together
# Role -> names of the spans that the timeline shows.
SHOWN = {
    "coordinator": ("rollout", "train", "sync", "evaluate", "checkpoint"),
    "trainer": ("train_step", "forward_backward", "optimizer", "publish"),
    "rollout": ("turn", "load_version"),
}


@dataclass
class Row:
    """A rank's row of the timeline: the spans of all attempts, by start. Spans that overlap are
    drawn in different lanes of the row."""

    name: str
    role: str
    spans: list[Span] = field(default_factory=list)
    lanes: list[int] = field(default_factory=list)  # lane of each span


def build_timeline(run_dir: Path | str) -> dict[str, Any] | None:
    """Return the timeline as the page reads it (times in ms from `t0`, which is in wall clock
    seconds); None without spans."""
    rows: dict[str, Row] = {}
    steps: list[dict[str, Any]] = []
    for rank in read_events(run_dir):
        _collect(rank, rows, steps)
    shown = sorted((row for row in rows.values() if row.spans), key=_row_order)
    if not shown:
        return None
    t0 = min(row.spans[0].start for row in shown)
    end = max(span.end for row in shown for span in row.spans)
    steps.sort(key=lambda step: step["start"])
    kept = _windows_that_fit(shown, steps)
    if kept is not None and len(steps) > MAX_STEPS:
        steps = [step for step in steps if any(step["start"] == start for start, _ in kept)]
    shown = shown[:MAX_ROWS]
    return {
        "t0": t0 / 1e6,
        "end": _ms(end - t0),
        "rows": _row_table(shown, t0, end),
        "steps": [s | {"start": _ms(s["start"] - t0), "end": _ms(s["end"] - t0)} for s in steps],
        "kept": None if kept is None else [[_ms(a - t0), _ms(b - t0)] for a, b in kept],
        "marks": _marks(shown, t0, kept),
    }


def _collect(rank: RankEvents, rows: dict[str, Row], steps: list[dict[str, Any]]) -> None:
    """Add the rank's shown spans to its row, and the coordinator's steps to `steps`."""
    if rank.role not in SHOWN:
        return
    spans = spans_of(rank)
    steps += [
        {"step": s.args.get("step", 0), "attempt": rank.attempt, "start": s.start, "end": s.end}
        for s in spans
        if rank.role == "coordinator" and s.name == "step"
    ]
    spans = [span for span in spans if span.name in SHOWN[rank.role]]
    row = rows.setdefault(rank.name, Row(rank.name, rank.role))
    row.spans += spans
    row.lanes += assign_lanes(spans, nest=False)


def _row_order(row: Row) -> tuple:
    return list(SHOWN).index(row.role), natural(row.name)


def _windows_that_fit(rows: list[Row], steps: list[dict[str, Any]]) -> list[tuple[int, int]] | None:
    """Return None if `MAX_MARKS` has room for all spans; otherwise time windows of whole steps,
    spread evenly over the run, with as many spans as fit."""
    starts = np.sort(np.array([span.start for row in rows for span in row.spans]))
    if len(starts) <= MAX_MARKS:
        return None
    if not steps:
        return [(int(starts[0]), int(starts[MAX_MARKS]))]
    bounds = np.array([[step["start"], step["end"]] for step in steps])
    last = starts[np.minimum(np.searchsorted(starts, bounds[:, 0]) + MAX_MARKS, len(starts) - 1)]
    bounds[:, 1] = np.minimum(bounds[:, 1], last)  # an early end for a step with too many marks
    counts = np.diff(np.searchsorted(starts, bounds), axis=1)[:, 0]
    share = max(1, int(len(steps) * MAX_MARKS / max(1, counts.sum())))
    while True:
        chosen = np.unique(np.linspace(0, len(steps) - 1, min(share, len(steps))).astype(int))
        if counts[chosen].sum() <= MAX_MARKS or share == 1:
            return [(int(a), int(b)) for a, b in bounds[chosen]]
        share = max(1, share - max(1, share // 10))


def _row_table(rows: list[Row], t0: int, end: int) -> list[dict[str, Any]]:
    """Return the rows as the page reads them, without their single spans."""
    engines = sum(row.role == "rollout" for row in rows)
    bins = max(100, min(1500, OCCUPANCY_NUMBERS // max(1, engines)))
    return [
        {
            "name": row.name,
            "role": row.role,
            "lanes": max(row.lanes) + 1,
            "occupancy": occupancy(row.spans, t0, end, bins) if row.role == "rollout" else [],
        }
        for row in rows
    ]


def occupancy(spans: list[Span], t0: int, end: int, bins: int) -> list[float]:
    """Return the mean number of running turns in each of `bins` equal parts of [t0, end]."""
    edges = np.linspace(t0, max(end, t0 + 1), bins + 1)
    turns = [span for span in spans if span.name == "turn"]

    def passed(times: list[int]) -> np.ndarray:
        """Return, per edge, the sum over the times of max(0, edge - time)."""
        ordered = np.sort(np.array(times, dtype=float))
        total = np.concatenate([[0.0], np.cumsum(ordered)])
        before = np.searchsorted(ordered, edges)
        return before * edges - total[before]

    busy = np.diff(passed([s.start for s in turns]) - passed([s.end for s in turns]))
    return [round(float(value), 1) for value in busy / np.diff(edges)]


def _marks(rows: list[Row], t0: int, kept: list[tuple[int, int]] | None) -> dict[str, list]:
    """Return the spans within the windows `kept` (None: all) as columns. `kind` and `finish` are
    indices into `kinds` and `finishes`."""
    names = ("row", "lane", "start", "length", "kind", "id", "tokens", "version", "finish")
    columns: dict[str, list] = {name: [] for name in names}
    kinds: list[str] = []
    finishes: list[str] = []
    windows = np.array(kept if kept is not None else [(t0, np.iinfo(np.int64).max)])
    for number, row in enumerate(rows):
        # All of the coordinator's phases are kept, for the overview.
        whole = row.role == "coordinator" and len(row.spans) <= MAX_MARKS
        for span, lane in zip(row.spans, row.lanes, strict=False):
            i = np.searchsorted(windows[:, 0], span.start, side="right") - 1
            if not whole and (i < 0 or span.start > windows[i, 1]):
                continue
            args = span.args
            mark = {
                "row": number,
                "lane": lane,
                "start": _ms(span.start - t0),
                "length": _ms(span.end - span.start),
                "kind": _index(kinds, span.name),
                "id": str(args.get("turn", args.get("step", "")))[:64],
                "tokens": args.get("tokens"),
                "version": args.get("version"),
                "finish": _index(finishes, str(args.get("finish", ""))[:32]),
            }
            for key, value in mark.items():
                columns[key].append(value)
    return columns | {"kinds": kinds, "finishes": finishes}


def _index(names: list[str], name: str) -> int:
    """Return the index of `name`, which is added if absent."""
    if name not in names:
        names.append(name)
    return names.index(name)


def _ms(microseconds: int) -> float:
    return round(microseconds / 1e3, 1)
