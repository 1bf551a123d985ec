"""The availability of spot instances over time, from a file or generated with similar statistics.

There are two formats, both of Bamboo's traces (Thorpe et al., NSDI 2023; RLBoost replays them),
recognized by the first line: `milliseconds,add|remove,name`, and `date, time, count`, a sampled
count. The second format names no instances: those that are removed when the count falls are drawn
at random. That agrees with traces in the first format, which remove instances of any age: in the p3
trace their mean rank by age is 0.52 of 0..1.
"""

from __future__ import annotations

import csv
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rose.parts.simulator.traces.trace import TraceError

HOUR_S = 3600.0  # definition: seconds of an hour
LATEST_MS = 10**15  # ours: 30,000 years; a larger number is no time
MOST = 10**6  # ours: instances at once, since each takes memory


@dataclass(frozen=True)
class Statistics:
    """The statistics of a trace, which `generate` reproduces."""

    mean: float  # mean number of instances
    most: int  # largest number of instances
    # mean life of an instance: instance-seconds / removals; infinite without removals
    life_s: float
    removed_at_once: float  # mean number of instances per removal
    added_at_once: float  # mean number of instances per addition


@dataclass(frozen=True)
class Availability:
    """A trace of spot instances, from 0 to `seconds`. Instance i is available in [begin[i],
    end[i]); if it is never removed, end[i] is `seconds`."""

    begin: np.ndarray  # (instances,) float64, seconds, ascending
    end: np.ndarray  # (instances,) float64, seconds
    seconds: float

    def __len__(self) -> int:
        return len(self.begin)

    def count(self, at: float | np.ndarray) -> np.ndarray:
        """Return the number of instances at these times, int64 in the shape of `at`."""
        return np.searchsorted(self.begin, at, "right") - np.searchsorted(
            np.sort(self.end), at, "right"
        )

    @property
    def changes(self) -> tuple[np.ndarray, np.ndarray]:
        """Times from 0 at which the count changes, and the counts: (n,) float64, (n,) int64."""
        at = np.unique(np.concatenate([[0.0], self.begin, self.end[self.end < self.seconds]]))
        return at, self.count(at)

    def slice(self, start_s: float, seconds: float) -> Availability:
        """Return the part within [start_s, start_s + seconds), with times from `start_s`."""
        stop = min(start_s + seconds, self.seconds)
        held = (self.begin < stop) & (self.end > start_s)
        begin = np.maximum(self.begin[held], start_s) - start_s
        end = np.minimum(self.end[held], stop) - start_s
        order = np.argsort(begin, kind="stable")
        return Availability(begin[order], end[order], max(0.0, stop - start_s))

    def limited(self, most: int) -> Availability:
        """Return a part with at most `most` instances at once, for a smaller cluster: an instance
        is left out if `most` others are available when it begins."""
        held: list[float] = []
        taken = np.zeros(len(self), bool)
        for at, (begin, end) in enumerate(zip(self.begin, self.end, strict=False)):
            held = [until for until in held if until > begin]
            taken[at] = len(held) < most
            if taken[at]:
                held.append(end)
        return Availability(self.begin[taken], self.end[taken], self.seconds)

    @property
    def statistics(self) -> Statistics:
        removed = self.end[self.end < self.seconds]
        added = self.begin[self.begin > 0]
        held = float((self.end - self.begin).sum())
        return Statistics(
            mean=held / self.seconds,
            most=int(self.count(np.unique(self.begin)).max()),
            life_s=held / len(removed) if len(removed) else math.inf,
            removed_at_once=len(removed) / max(1, len(np.unique(removed))),
            added_at_once=len(added) / max(1, len(np.unique(added))),
        )


def read(path: str | Path, seed: int = 0) -> Availability:
    """Read a trace. `seed` draws the instances that a falling count removes. Raises `OSError`, or a
    `TraceError` that names file, line and column in these cases:
    - the file is empty or has neither format;
    - a field is missing, negative or no number;
    - a time is before that of the line above;
    - an instance is added twice, or removed without having been added.
    """
    path = Path(path)
    with path.open(newline="", encoding="utf-8-sig", errors="replace") as file:
        reader = csv.reader(file)
        try:
            rows = [
                (line, [cell.strip() for cell in row]) for line, row in enumerate(reader, 1) if row
            ]
        except csv.Error as error:  # such as a quote that is never closed
            raise TraceError(f"{path}, line {reader.line_num}: no CSV: {error}") from None
    if not rows:
        raise TraceError(
            f"{path}, line 1: an empty file; needed `milliseconds,add|remove,name` or `date, time, "
            "count`"
        )
    changes, last = (
        _named(rows, path) if rows[0][1][0].lstrip("-").isdigit() else _counted(rows, path, seed)
    )
    there: dict[str, float] = {}
    spans: list[tuple[float, float]] = []
    for at, line, name, comes in changes:
        if comes == (name in there):
            raise TraceError(
                f"{path}, line {line}, column 3: {name} is "
                f"{'added twice' if comes else 'not there'}"
            )
        if comes:
            there[name] = at
        else:
            spans.append((there.pop(name), at))
    spans += [(begin, last) for begin in there.values()]
    spans = sorted(span for span in spans if span[1] > span[0])
    if not spans:
        raise TraceError(f"{path}: no instance is there for any time")
    return Availability(np.array([b for b, _ in spans]), np.array([e for _, e in spans]), last)


Rows = list[tuple[int, list[str]]]
# (seconds from the first line, line, instance, True if it is added)
Change = tuple[float, int, str, bool]


def _named(rows: Rows, path: Path) -> tuple[list[Change], float]:
    """Return (changes in order, time of the last line) of a file in the first format."""
    changes: list[Change] = []
    for line, row in rows:
        _check_fields(row, ("milliseconds", "add or remove", "name"), path, line)
        at = _natural(row[0], path, line, 1, LATEST_MS) / 1000
        if changes and at < changes[-1][0]:
            raise TraceError(
                f"{path}, line {line}, column 1: {row[0]} is before the time of the line above"
            )
        if row[1] not in ("add", "remove"):
            raise TraceError(f"{path}, line {line}, column 2: {row[1]!r} is neither add nor remove")
        changes.append((at, line, row[2], row[1] == "add"))
    first = changes[0][0]
    since_first = [(at - first, line, name, added) for at, line, name, added in changes]
    return since_first, changes[-1][0] - first


def _counted(rows: Rows, path: Path, seed: int) -> tuple[list[Change], float]:
    """Return (changes in order, time of the last line) of a file in the second format."""
    draw = np.random.default_rng(seed)
    changes: list[Change] = []
    there: list[str] = []
    first = last = _clock(rows[0][1], path, rows[0][0])
    named = 0
    for line, row in rows:
        at = _clock(row, path, line)
        if at < last:
            raise TraceError(
                f"{path}, line {line}, column 2: {row[0]} {row[1]} is before the time of the line "
                "above"
            )
        last, count = at, _natural(row[2], path, line, len(row), MOST)
        while len(there) > count:
            changes.append((at - first, line, there.pop(draw.integers(len(there))), False))
        while len(there) < count:
            there.append(f"i{named}")
            named += 1
            changes.append((at - first, line, there[-1], True))
    return changes, last - first


def _check_fields(row: list[str], names: tuple[str, ...], path: Path, line: int) -> None:
    if len(row) != len(names):
        raise TraceError(
            f"{path}, line {line}, column {min(len(row), len(names)) + 1}: {len(row)} fields; "
            f"needed are {len(names)}: {', '.join(names)}"
        )


def _clock(row: list[str], path: Path, line: int) -> float:
    """Parse the date and time of a row to seconds."""
    _check_fields(row, ("date", "time", "count"), path, line)
    try:
        time = np.datetime64(f"{row[0]}T{row[1]}", "s")
        if np.isnat(time):
            raise ValueError
        return float(time.astype(np.int64))
    except ValueError:
        raise TraceError(
            f"{path}, line {line}, column 1: {row[0]!r}, {row[1]!r} is no time like 2021-12-11, "
            "11:11:30"
        ) from None


def _natural(text: str, path: Path, line: int, column: int, most: int) -> int:
    """Parse a whole number of 0..`most`."""
    try:
        number = int(text)
    except ValueError:
        raise TraceError(
            f"{path}, line {line}, column {column}: {text!r} is no whole number"
        ) from None
    if number < 0:
        raise TraceError(f"{path}, line {line}, column {column}: {number} is negative")
    if number > most:
        raise TraceError(f"{path}, line {line}, column {column}: {text[:20]} is more than {most:g}")
    return number


def generate(
    seed: int,
    seconds: float,
    most: int = 32,  # github.com/uclasystem/bamboo, its p3 trace
    life_s: float = 1.65 * HOUR_S,  # github.com/uclasystem/bamboo, its p3 trace
    removed_at_once: float = 2.1,  # github.com/uclasystem/bamboo, its p3 trace
    added_at_once: float = 2.1,  # github.com/uclasystem/bamboo, its p3 trace
    restore_s: float = 0.5 * HOUR_S,  # github.com/uclasystem/bamboo, its p3 trace
) -> Availability:
    """Generate the availability of a pool that wants `most` instances. The same arguments generate
    the same availability.

    An instance lives for `life_s` on average, and a missing instance is replaced after `restore_s`
    on average. The number of instances per removal and per addition is geometric, of mean
    `removed_at_once` and `added_at_once`. The defaults are the statistics of Bamboo's p3 trace,
    which has 24 of at most 32 instances on average. Raises `ValueError` for arguments that are not
    positive, or fewer than one instance at once.
    """
    if not (min(seconds, most, life_s, restore_s) > 0 and min(removed_at_once, added_at_once) >= 1):
        raise ValueError(
            f"seconds={seconds:g}, most={most}, life_s={life_s:g}, restore_s={restore_s:g}: must "
            f"be positive; removed_at_once={removed_at_once:g}, added_at_once={added_at_once:g}: 1 "
            "at least"
        )
    draw = np.random.default_rng(seed)
    # The pool begins in equilibrium.
    there = [0.0] * max(1, round(most * life_s / (life_s + restore_s)))
    spans: list[tuple[float, float]] = []
    at = 0.0
    while True:
        removals = len(there) / life_s / removed_at_once  # per second
        additions = (most - len(there)) / restore_s / added_at_once  # per second
        at += draw.exponential(1 / (removals + additions))
        if at >= seconds:
            break
        if draw.random() * (removals + additions) < removals:
            for _ in range(min(len(there), draw.geometric(1 / removed_at_once))):
                spans.append((there.pop(draw.integers(len(there))), at))
        else:
            there += [at] * min(most - len(there), draw.geometric(1 / added_at_once))
    spans = sorted(spans + [(begin, seconds) for begin in there])
    return Availability(np.array([b for b, _ in spans]), np.array([e for _, e in spans]), seconds)
