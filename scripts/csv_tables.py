"""Tables of results: CSV files, and Markdown between marks in the docs. Not a command."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from rose.files import write_whole
from rose.places import REPOSITORY

RESULTS = REPOSITORY / "docs" / "results"
WIDTH = 160  # columns of a printed table, at most


def write_csv(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    def plain(value: Any) -> Any:
        return ("" if math.isnan(value) else f"{value:.4g}") if isinstance(value, float) else value

    path.parent.mkdir(parents=True, exist_ok=True)
    columns = list(dict.fromkeys(key for row in rows for key in row))
    with path.open("w", newline="", encoding="utf-8") as file:
        out = csv.DictWriter(file, columns, lineterminator="\n")
        out.writeheader()
        out.writerows({key: plain(value) for key, value in row.items()} for row in rows)


def read_csv(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def merge(
    path: Path,
    rows: Sequence[dict[str, Any]],
    key: Callable[[Mapping[str, Any]], Any],
    order: Callable[[Mapping[str, Any]], Any],
) -> None:
    """Write `rows` beside the file's rows that have another `key`, sorted by `order`."""
    new = {key(row) for row in rows}
    kept = [row for row in (read_csv(path) if path.exists() else []) if key(row) not in new]
    write_csv(path, sorted([*kept, *rows], key=order))


def show(rows: Sequence[dict[str, Any]], title: str) -> None:
    """Print rows as a table."""
    made = Table(title=title, title_justify="left")
    for key, value in rows[0].items():
        made.add_column(
            key.replace("_", " "), justify="left" if isinstance(value, str) else "right"
        )
    for row in rows:
        shown = (f"{v:.4g}" if isinstance(v, float) else str(v) for v in row.values())
        made.add_row(*("–" if words == "nan" else words for words in shown))
    Console(width=WIDTH).print(made)


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    first, *rest = (f"| {' | '.join(cells)} |" for cells in (header, *rows))
    return "\n".join([first, "|---" * len(header) + "|", *rest])


def middle(values: Sequence[float], form: str = ".2f") -> str:
    """Format the median and the range of values as 1.31 (1.28 to 1.34)."""
    return f"{median(values):{form}} ({min(values):{form}} to {max(values):{form}})"


def bounded(mean: float, low: float, high: float, form: str = ".2f") -> str:
    """Format a mean and its interval as 1.31 (1.28–1.34), without bounds that are NaN."""
    bounds = "" if math.isnan(low + high) else f" ({low:{form}}–{high:{form}})"
    return f"{mean:{form}}{bounds}"


def with_bounds(row: Mapping[str, str], key: str, low: str, high: str, form: str = ".2f") -> str:
    """Format three columns of a CSV row as `bounded` does. An empty bound is NaN."""
    return bounded(*(float(row[name] or "nan") for name in (key, low, high)), form)


def draw(path: Path, page: str, name: str, words: Callable[[list[dict[str, str]]], str]) -> None:
    """Put the table that `words` formats of one of the docs' own CSV files into a page."""
    if path.parent == RESULTS and path.exists():
        put(REPOSITORY / "docs" / page, name, words(read_csv(path)))


def put(page: Path, name: str, text: str) -> None:
    """Replace the text between <!-- NAME: ... --> and <!-- end of NAME --> of a page. Raises
    `SystemExit` if it has no such marks."""
    before, begun, rest = page.read_text(encoding="utf-8").partition(f"<!-- {name}: ")
    first, newline, rest = rest.partition("\n")
    _, ended, after = rest.partition(f"<!-- end of {name} -->")
    if not (begun and ended):
        marks = f"<!-- {name}: ... --> and <!-- end of {name} -->"
        raise SystemExit(f"{page}: no {marks} to write between")
    write_whole(page, f"{before}{begun}{first}{newline}{text}\n{ended}{after}".encode())
