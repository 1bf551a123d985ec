"""Write the table of features that exclude each other in docs/configuration.md.

python scripts/tabulate_exclusions.py
"""

from __future__ import annotations

from csv_tables import REPOSITORY, put

from rose.launch import exclusions

PAGE = REPOSITORY / "docs" / "configuration.md"


def text() -> str:
    """Return a table with a row for each feature: which are impossible, or not tried, with it."""
    found: dict[str, tuple[list[str], list[str]]] = {}
    for row in exclusions.rows():
        impossible, untried = found.setdefault(row.other.name, ([], []))
        (impossible if row.because else untried).append(row.feature.name)
    rows = [f"| {name} | {', '.join(a)} | {', '.join(b)} |" for name, (a, b) in found.items()]
    return "\n".join(
        ["| feature | impossible with it | not tried with it |", "|---|---|---|", *rows]
    )


if __name__ == "__main__":
    put(PAGE, "exclusions", text())
