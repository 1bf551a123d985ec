"""The boards' states over time, for the report: one row a second, fewer in a long history.

The counters of an engine's board restart at 0 with the engine; the counters here continue.
"""

from __future__ import annotations

import time
from typing import Any

from rose.parts.lending.board import Control, Online, Rollout
from rose.parts.lending.operator.metrics import Boards

EVERY_S = 1.0  # seconds between two rows at first
# With more rows than this, every second row is dropped, and the time between two rows doubles.
MOST_ROWS = 1800

BOTH = ("prompt_tokens", "made_tokens", "busy_s")
# Board -> fields that are summed over all processes that wrote it.
COUNTED = {
    "online": ("finished", "met", "finished_lending", "met_lending", "aborted", "preempted", *BOTH),
    "rollout": ("evicted", "wasted_tokens", "open_s", "shut_s", *BOTH),
}
# Board -> fields that are recorded as they are.
SHOWN = {
    "online": ("running", "waiting", "kv_used", "kv_held"),
    "rollout": ("running", "waiting", "kv_used", "kv_budget"),
}


class _Counter:
    """Sums of one board's counters over the processes that wrote it."""

    def __init__(self, fields: tuple[str, ...]) -> None:
        self._fields = fields
        self._writer: tuple[float, float] | None = None
        self._before = dict.fromkeys(fields, 0.0)
        self.sums = dict.fromkeys(fields, 0.0)

    def add(self, state: Online | Rollout) -> None:
        if (state.pid, state.pid_started) != self._writer:
            self._writer = state.pid, state.pid_started
            self._before = dict.fromkeys(self._fields, 0.0)
        for field in self._fields:
            now = getattr(state, field)
            self.sums[field] += max(0.0, now - self._before[field])
            self._before[field] = now


class History:
    """The recorded states. `rows` is {"t": [seconds since start], "online.finished": [...], ...},
    with lists of equal length."""

    def __init__(self) -> None:
        self._counters = {name: _Counter(fields) for name, fields in COUNTED.items()}
        self._began = time.monotonic()
        self._next = 0.0
        self.every_s = EVERY_S
        of_boards = [f"{b}.{f}" for kind in (COUNTED, SHOWN) for b in kind for f in kind[b]]
        names = ("t", "lend", "share", *of_boards)
        self.rows: dict[str, list[float]] = {name: [] for name in names}

    def add(self, boards: Boards) -> None:
        """Add the states to the counters, and to the rows if one is due. Call it every EVERY_S."""
        for name, counter in self._counters.items():
            if (state := getattr(boards, name)) is not None:
                counter.add(state)
        t = time.monotonic() - self._began
        if t < self._next:
            return
        self._next = t + self.every_s - EVERY_S / 2
        for name, value in self._row(t, boards).items():
            self.rows[name].append(value)
        if len(self.rows["t"]) > MOST_ROWS:
            self.rows = {name: values[::2] for name, values in self.rows.items()}
            self.every_s *= 2

    def totals(self) -> dict[str, float]:
        """Return BOARD.FIELD -> sum since the start, for the fields in COUNTED."""
        counted = self._counters.items()
        return {f"{b}.{f}": value for b, counter in counted for f, value in counter.sums.items()}

    def _row(self, t: float, boards: Boards) -> dict[str, Any]:
        control = boards.control or Control()
        shown = {
            f"{b}.{f}": getattr(state, f) if (state := getattr(boards, b)) is not None else 0.0
            for b, fields in SHOWN.items()
            for f in fields
        }
        return {"t": t, "lend": control.lend, "share": control.share} | self.totals() | shown
