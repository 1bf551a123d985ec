"""Every number that the simulator has of its own says on its own line where it is from.

Checked is all of rose/parts/simulator but hardware.py, a table of published figures with a source
beside each. The source is a comment on the number's line, in a form that `SOURCE` knows; a table of
nothing but numbers may have it on its first or last line. Exempt are the numbers `ALWAYS`, indices,
and the arguments `indent` and `maxsize`; within an expression of a function those of `WITHIN`, too:
a number that has a name, is a default or goes to a parameter by its name is no half and no unit.
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
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    comments = {each.start[0]: each.string for each in tokens if each.type == tokenize.COMMENT}
    lines, found = text.splitlines(), {}
    for node, named, places in numbers(ast.parse(text), False, ()):
        if node.value in (ALWAYS if named else WITHIN):
            continue
        if not any(SOURCE.search(comments.get(line, "")) for line in (node.lineno, *places)):
            found[node.lineno] = f"{node.lineno}: {lines[node.lineno - 1].strip()}"
    return [found[line] for line in sorted(found)]


def numbers(node: ast.AST, named: bool, places: tuple[int, ...]):
    """(number, whether under a name, more lines that may say its source) of all under `node`."""
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
            index = isinstance(node, ast.Subscript) and field == "slice"
            if isinstance(child, ast.AST) and not (index and not has_arithmetic(child)):
                yield from numbers(child, under_a_name(node, field, named), places)


def under_a_name(node: ast.AST, field: str, named: bool) -> bool:
    """Return True if the value in this field of a node has a name: defaults, keyword arguments, what is
    assigned in modules and classes, and variables that are a number and nothing more."""
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
