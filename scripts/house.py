"""How large the house is, beside what it should be.

    python scripts/house.py

Lines are of files as ruff formats them (`make lint` checks that they are). Exit code 1 when modules
or folders of rose/ import each other in a circle, imports inside of functions included, and when a
text file is opened without its encoding: that would be the locale's.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import grimp
from rich.console import Console
from rich.table import Table

REPOSITORY = Path(__file__).resolve().parents[1]
SMALL = 40  # lines: a file with fewer had better be a part of another
# A model that these made is named by their content: an edit makes everybody's anew.
RECIPES = ("make_tiny_model.py", "make_smollm2.py")
ONE_OF_MANY = ("policies", "algorithms", "envs", "batching", "order", "routing", "provisioning")


def lines(folder: str) -> int:
    return sum(
        len(path.read_text(encoding="utf-8").splitlines())
        for path in (REPOSITORY / folder).rglob("*.py")
    )


def small_files() -> int:
    """Files of rose/ that are short, and no policy, algorithm or environment."""
    found = 0
    for path in (REPOSITORY / "rose").rglob("*.py"):
        short = (
            len(path.read_text(encoding="utf-8").splitlines()) < SMALL
            and path.name != "__init__.py"
        )
        found += short and not set(ONE_OF_MANY) & set(path.parts)
    return found


def words() -> int:
    """Of prose, tables and commands; bars of tables are none."""
    pages = [*(REPOSITORY / "docs").glob("*.md"), REPOSITORY / "README.md"]
    return sum(len(re.findall(r"\S*\w\S*", page.read_text(encoding="utf-8"))) for page in pages)


def circles() -> list[str]:
    """Each folder whose children import each other in a circle, with the imports that close it."""
    sys.path.insert(0, str(REPOSITORY))
    graph = grimp.build_graph("rose", cache_dir=None)
    found = []
    for package in ["rose", *(m for m in graph.modules if graph.find_children(m) and m != "rose")]:
        for one, other in graph.nominate_cycle_breakers(package):
            found.append(f"{one} imports {other}")
    return found


def without_encoding(source: str) -> list[ast.Call]:
    """Each call in `source` that opens, reads or writes a text file in the locale's encoding."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    return [call for call in calls if _opens_text(call)]


def _opens_text(call: ast.Call) -> bool:
    """Judge by the names of pathlib's and the built-in functions, whatever they are called on."""
    given = {each.arg: each.value for each in call.keywords}
    if "encoding" in given or None in given:
        return False
    method = isinstance(call.func, ast.Attribute)
    name = call.func.attr if method else getattr(call.func, "id", "")
    if name in ("read_text", "write_text"):
        return len(call.args) < (1 if name == "read_text" else 2)
    if name not in ("open", "fdopen"):
        return False
    at = 0 if method and name == "open" else 1  # PATH.open(mode), open(path, mode)
    mode = given.get("mode", call.args[at] if call.args[at:] else None)
    if mode is None:
        return not method or name == "fdopen"  # many things have a method `open`
    return isinstance(mode, ast.Constant) and set(str(mode.value)) <= set("rwxat+")


def unencoded() -> list[str]:
    """Each place in rose/ and scripts/ where a text file is opened without its encoding."""
    return [
        f'{path.relative_to(REPOSITORY)}:{call.lineno}: encoding="utf-8" is missing'
        for folder in ("rose", "scripts")
        for path in sorted((REPOSITORY / folder).rglob("*.py"))
        if path.name not in RECIPES
        for call in without_encoding(path.read_text(encoding="utf-8"))
    ]


def main() -> int:
    closing, places = circles(), unencoded()
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
    print(*closing, *places, sep="\n", end="\n" if closing or places else "")
    return 1 if closing or places else 0


if __name__ == "__main__":
    sys.exit(main())
