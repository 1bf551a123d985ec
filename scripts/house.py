"""How large the house is, beside what it should be.

    python scripts/house.py

Lines are of files as ruff formats them (`make lint` checks that they are). Exit code 1 when modules
or folders of rose/ import each other in a circle, imports inside of functions included.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import grimp
from rich.console import Console
from rich.table import Table

REPOSITORY = Path(__file__).resolve().parents[1]
SMALL = 40  # lines: a file with fewer had better be a part of another
ONE_OF_MANY = ("policies", "algorithms", "envs", "batching", "order", "routing", "provisioning")


def lines(folder: str) -> int:
    return sum(len(path.read_text().splitlines()) for path in (REPOSITORY / folder).rglob("*.py"))


def small_files() -> int:
    """Files of rose/ that are short, and no policy, algorithm or environment."""
    found = 0
    for path in (REPOSITORY / "rose").rglob("*.py"):
        short = len(path.read_text().splitlines()) < SMALL and path.name != "__init__.py"
        found += short and not set(ONE_OF_MANY) & set(path.parts)
    return found


def words() -> int:
    """Of prose, tables and commands; bars of tables are none."""
    pages = [*(REPOSITORY / "docs").glob("*.md"), REPOSITORY / "README.md"]
    return sum(len(re.findall(r"\S*\w\S*", page.read_text())) for page in pages)


def circles() -> list[str]:
    """Each folder whose children import each other in a circle, with the imports that close it."""
    sys.path.insert(0, str(REPOSITORY))
    graph = grimp.build_graph("rose", cache_dir=None)
    found = []
    for package in ["rose", *(m for m in graph.modules if graph.find_children(m) and m != "rose")]:
        for one, other in graph.nominate_cycle_breakers(package):
            found.append(f"{one} imports {other}")
    return found


def main() -> int:
    closing = circles()
    table = Table("what", "today", "at most", title="The house", title_justify="left")
    for what, today, most in (
        ("lines of rose/", lines("rose"), 30_000),
        (f"files of rose/ under {SMALL} lines, no policies and the like", small_files(), 5),
        ("lines of scripts/", lines("scripts"), 4_500),
        ("lines of rose/transfer/", lines("rose/transfer"), 3_600),
        ("words in docs/ and README.md", words(), 13_500),
        ("imports that close a circle", len(closing), 0),
    ):
        table.add_row(what, f"{today:,}", f"{most:,}")
    Console().print(table)
    print(*closing, sep="\n", end="\n" if closing else "")
    return 1 if closing else 0


if __name__ == "__main__":
    sys.exit(main())
