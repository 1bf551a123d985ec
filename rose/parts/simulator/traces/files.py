"""Reads request traces in the public formats, which are recognized by a file's first line.

- Azure (Patel et al., Splitwise, ISCA 2024): CSV; TIMESTAMP (a date and time), ContextTokens,
  GeneratedTokens.
- BurstGPT (Wang et al., KDD 2025): CSV; Timestamp (seconds), Model, Request tokens, Response
  tokens, Total tokens, Log Type. A failed request has 0 response tokens.
- Mooncake (Qin et al., FAST 2025): a JSON object per line; timestamp (milliseconds), input_length,
  output_length, hash_ids (a list with one per 512 tokens of the prompt; may be missing).

Columns are found by name; other columns and blank lines are ignored. No format has the prompts'
texts.
"""

from __future__ import annotations

import csv
import itertools
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import numpy as np

from rose.parts.simulator.traces.trace import LARGEST, Trace, TraceError

BLOCKS = "hash_ids"  # Mooncake's field of blocks


class Place(NamedTuple):
    """The place of a field, for error messages."""

    path: Path
    line: int
    column: str

    def wrong(self, what: str) -> TraceError:
        return TraceError(f"{self.path}, line {self.line}, column {self.column}: {what}")


class Format(NamedTuple):
    """A public format of request traces."""

    name: str
    columns: tuple[str, str, str]  # time, prompt tokens, output tokens
    time: Callable[[Any, Place], float]  # parser of the first column; times have any origin
    unit: float  # seconds per unit of a parsed time


def read(path: str | Path) -> Trace:
    """Read a trace. Raises `OSError`, or a `TraceError` that names file, line and column in these
    cases: the first line fits no format, a column is missing, a field is no time or number of
    tokens, a time is before that of the line above, or there are no requests."""
    path = Path(path)
    with path.open(newline="", encoding="utf-8-sig", errors="replace") as file:
        first = file.readline()
        rest = itertools.chain([first], file)
        found, fields = (
            (MOONCAKE, _objects(rest, path))
            if first.lstrip().startswith("{")
            else _table(rest, path)
        )
        times: list[float] = []
        lengths: tuple[list[int], list[int]] = ([], [])
        blocks: list[tuple[int, ...] | None] = []
        for line, (field, prompt, output, *more) in fields:
            place = Place(path, line, found.columns[0])
            time = found.time(field, place)
            if times and time < times[-1]:
                raise place.wrong(
                    f"{field} is before the time of the line above; sort the file by time"
                )
            times.append(time)
            for column, field, into in zip(
                found.columns[1:], (prompt, output), lengths, strict=False
            ):
                into.append(_count(field, Place(path, line, column)))
            blocks.append(_blocks(more[0], Place(path, line, BLOCKS)) if more else None)
    if not times:
        raise TraceError(f"{path}: no requests below the header")
    at = np.array(times)
    return Trace(
        (at - at[0]) * found.unit,
        np.array(lengths[0], np.int32),
        np.array(lengths[1], np.int32),
        None if None in blocks else tuple(blocks),
    )


def _table(lines: Iterator[str], path: Path) -> tuple[Format, Iterator[tuple[int, list[str]]]]:
    """Return the CSV format that fits the header best, and the fields of the rows."""
    rows = _rows(csv.reader(lines), path)
    header = [name.strip() for name in next(rows, (1, []))[1]]
    found = max((AZURE, BURSTGPT), key=lambda f: sum(name in header for name in f.columns))
    missing = [name for name in found.columns if name not in header]
    if len(missing) == len(found.columns):
        raise TraceError(
            f"{path}, line 1: {header or 'an empty file'} is no header of a request trace; "
            "known are "
            + ", ".join(f"{f.name} ({', '.join(f.columns)})" for f in (AZURE, BURSTGPT))
            + f" and {MOONCAKE.name} (a JSON object a line: {', '.join(MOONCAKE.columns)})"
        )
    if missing:
        raise TraceError(
            f"{path}, line 1: no column {', '.join(missing)}; found {header}, "
            f"{found.name} needs {', '.join(found.columns)}"
        )
    return found, _cells(rows, header, [header.index(name) for name in found.columns], path)


def _rows(reader: Any, path: Path) -> Iterator[tuple[int, list[str]]]:
    """Yield each row with the number of its last line."""
    try:
        for row in reader:
            yield reader.line_num, row
    except csv.Error as error:  # such as a quote that is never closed
        raise TraceError(f"{path}, line {reader.line_num}: no CSV: {error}") from None


def _cells(
    rows: Iterator[tuple[int, list[str]]], header: list[str], places: list[int], path: Path
) -> Iterator[tuple[int, list[str]]]:
    """Yield (line, fields at `places`) of each row."""
    for line, row in rows:
        if not row:
            continue
        if len(row) <= max(places):
            raise TraceError(
                f"{path}, line {line}, column {header[len(row)]}: missing; {len(row)} fields, "
                f"the header has {len(header)}"
            )
        yield line, [row[place] for place in places]


def _objects(lines: TextIO | Iterator[str], path: Path) -> Iterator[tuple[int, list[Any]]]:
    """Yield (line, fields) of each JSON object; the blocks are last, if it has any."""
    for line, text in enumerate(lines, 1):
        if not text.strip():
            continue
        try:
            found = json.loads(text)
        except json.JSONDecodeError as error:
            raise TraceError(
                f"{path}, line {line}, character {error.colno}: no JSON: {error.msg}"
            ) from None
        # ValueError: a number of thousands of digits. RecursionError: deeply nested brackets.
        except (ValueError, RecursionError) as error:
            raise TraceError(f"{path}, line {line}: no JSON object of a trace: {error}") from None
        if not isinstance(found, dict):
            raise TraceError(f"{path}, line {line}: {text.strip()[:40]!r} is no JSON object")
        if missing := [name for name in MOONCAKE.columns if name not in found]:
            raise TraceError(
                f"{path}, line {line}: no column {', '.join(missing)}; {MOONCAKE.name} needs "
                f"{', '.join(MOONCAKE.columns)}"
            )
        yield (
            line,
            [
                *(found[name] for name in MOONCAKE.columns),
                *([found[BLOCKS]] if BLOCKS in found else []),
            ],
        )


def _date(field: str, place: Place) -> int:
    """Parse a date and time to nanoseconds."""
    text = field.strip().removesuffix("Z").removesuffix("+00:00")
    try:
        time = np.datetime64(text, "ns")
        if np.isnat(time):
            raise ValueError
        return time.astype(np.int64).item()
    except ValueError:
        raise place.wrong(f"{field!r} is no time like 2023-11-16 18:15:46.6805900") from None


def _number(field: Any, place: Place) -> float:
    """Parse a time that is a number."""
    try:
        if isinstance(field, bool):
            raise ValueError
        number = float(field)
    except (ValueError, TypeError):
        raise place.wrong(f"{field!r} is no number") from None
    if not (math.isfinite(number) and number >= 0):
        raise place.wrong(f"{field} is no time: it must be finite and not negative")
    return number


def _count(field: Any, place: Place) -> int:
    """Parse a number of tokens."""
    try:
        if isinstance(field, bool) or isinstance(field, float) and not field.is_integer():
            raise ValueError
        count = int(field)
    except (ValueError, TypeError, OverflowError):
        raise place.wrong(f"{field!r} is no whole number") from None
    if not 0 <= count <= LARGEST:
        raise place.wrong(f"{count} tokens, not within 0..{LARGEST}")
    return count


def _blocks(field: Any, place: Place) -> tuple[int, ...]:
    """Parse the numbers of a prompt's blocks (`Trace.blocks`)."""
    if not isinstance(field, list) or any(
        isinstance(each, bool) or not isinstance(each, int) for each in field
    ):
        raise place.wrong(f"{str(field)[:40]!r} is no list of whole numbers")
    return tuple(field)


NS, MS = 1e-9, 1e-3  # definition: seconds
AZURE = Format("Azure", ("TIMESTAMP", "ContextTokens", "GeneratedTokens"), _date, NS)
BURSTGPT = Format("BurstGPT", ("Timestamp", "Request tokens", "Response tokens"), _number, 1.0)
MOONCAKE = Format("Mooncake", ("timestamp", "input_length", "output_length"), _number, MS)
