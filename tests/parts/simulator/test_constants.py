"""Every number that the simulator has of its own says on its own line where it is from.

Checked are all numbers in rose/parts/simulator but for rose/parts/simulator/hardware.py, which is a table of published
figures with a source beside each. conf/ may say what a user would
change. A number is exempt only if it is structural:

- anywhere: 0, 1 and -1, indices and bounds of slices, and the arguments `indent` and `maxsize`,
  which change how a file looks and what a cache holds, no figure;
- within an expression of a function, besides: 2 and 1/2, and what converts units of time and size
  (60, 3600, 1e3, 1e6, 1e9).

So a number that has a name, is a default or goes to a parameter by its name is never exempt as a
half or a unit: `PACE = 0.5` once stood here without a source, and the headline hung on it. The
source is a comment on the number's line: `ours: why`, `definition: of what`, `numerics: what for`,
`made up: for what` (clusters of tests), a paper by its arXiv number, vLLM, or a file or page by its
path. A table of nothing but numbers may have it on its first or last line.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from pathlib import Path

import pytest

SIM = Path(__file__).resolve().parents[3] / "rose" / "parts" / "simulator"
FILES = sorted(path for path in SIM.rglob("*.py") if path.name != "hardware.py")
ALWAYS = (0, 1, -1)
WITHIN = (*ALWAYS, 2, 0.5, 60, 3600, 1e3, 1e6, 1e9)
SOURCE = re.compile(
    r"\b(ours|definition|numerics|made up): \w"
    r"|arXiv \d{4}\.\d{5}"
    r"|\bvLLM\b"
    r"|\b(docs|conf|rose|scripts|tests)/\w+"
    r"|\b[\w-]+\.(yaml|json|ai|com|io)\b"
)


def unsourced(text: str) -> list[str]:
    """The lines ("4: pace = 0.3") of numbers that are not structural and name no source."""
    comments = {
        token.start[0]: token.string
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type == tokenize.COMMENT
    }
    lines, found = text.splitlines(), {}
    for node, named, places in numbers(ast.parse(text), False, ()):
        if node.value in (ALWAYS if named else WITHIN):
            continue
        if not any(SOURCE.search(comments.get(line, "")) for line in (node.lineno, *places)):
            found[node.lineno] = f"{node.lineno}: {lines[node.lineno - 1].strip()}"
    return [found[line] for line in sorted(found)]


def numbers(node: ast.AST, named: bool, places: tuple[int, ...]):
    """(number, whether it stands under a name, lines that may say its source besides its own) of
    all numbers under `node` but indices."""
    if isinstance(node, ast.Constant):
        if isinstance(node.value, (int, float)) and not isinstance(node.value, bool):
            yield node, named, places
        return
    if isinstance(node, ast.keyword) and node.arg in ("indent", "maxsize"):
        return
    if isinstance(node, (ast.Tuple, ast.List)) and all(
        isinstance(element, ast.Constant) for element in node.elts
    ):
        places = (node.lineno, node.end_lineno)
    for field, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            if not isinstance(child, ast.AST) or (
                isinstance(node, ast.Subscript) and field == "slice" and not has_arithmetic(child)
            ):
                continue
            yield from numbers(child, under_a_name(node, field, named), places)


def under_a_name(node: ast.AST, field: str, named: bool) -> bool:
    """Of what stands in this field of a node that is, or isn't, under a name itself: assignments of
    modules and classes, defaults, keyword arguments and variables that are a number and nothing
    more name their numbers; other bodies of functions don't."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
        return field in ("args", "decorator_list")
    if isinstance(node, (ast.Assign, ast.AnnAssign)) and isinstance(node.value, ast.Constant):
        return True
    return named or isinstance(node, (ast.Module, ast.ClassDef, ast.keyword))


def has_arithmetic(index: ast.AST) -> bool:
    return any(isinstance(node, ast.BinOp) for node in ast.walk(index))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SIM)))
def test_every_number_of_the_simulator_names_its_source_on_its_line(path):
    found = unsourced(path.read_text())
    assert not found, "say their source there, or let conf/ or hardware.py have these numbers"


def test_the_simulator_was_looked_at():
    assert {"engine.py", "domains.py", "build.py"} <= {path.name for path in FILES}


@pytest.mark.parametrize(
    "text",
    [
        "PACE = 0.5",
        "PACE = 0.5  # of the target",
        "# ours: by eye\nPACE = 0.5",
        "MOST_S = 2 * 60.0",
        "def wait(*, tries=3): ...",
        "class Gate:\n    pace: float = 0.5",
        "def rates(busy):\n    return 0.9 * (1 - busy)",
        "def late(at):\n    pace = 0.5\n    return at > pace",
        "def start(pool):\n    pool.wake(seconds=0.5)",
        "def floor(c, at):\n    return c[at * 7]",
        "call = lambda at: at + 3",
        "@retried(tries=32)\ndef rate(): ...",
        "SHARES = (\n    0.2,\n    0.8,\n)",
    ],
)
def test_a_number_without_a_source_is_found(text):
    assert len(unsourced(text)) >= 1


@pytest.mark.parametrize(
    "text",
    [
        "PACE = 0.07  # ours: fitted to what serving loses",
        "PACE = 0.07  # ROSE (arXiv 2605.06534), table 1",
        "FREE = 0.01  # vLLM's watermark",
        "PACE = 0.07  # docs/simulator.md, serving",
        "NONE, WAITING = 0, 1",
        "@cache(maxsize=32)\ndef rate(): ...",
        "def first(rows):\n    return rows[3], rows[-2:], rows[:, 4]",
        "def minutes(seconds):\n    return (seconds + 0.5) / 60",
        "def middle(low, high):\n    return (low + high) / 2",
        "SHARES = (\n    0.2,\n    0.8,\n)  # ours: by eye",
        "ON = True\nNAME = '3 of 4'",
    ],
)
def test_structural_numbers_and_those_with_a_source_are_not(text):
    assert unsourced(text) == []
