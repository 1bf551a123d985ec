"""The kinds of finding that scripts/house.py counts:

    lines       lines of Python
    functions   functions longer than MOST_LINES_OF_FUNCTION lines
    files       files longer than MOST_LINES_OF_FILE lines
    classes     classes with more than MOST_ATTRIBUTES attributes
    prose       docstrings and trailing comments that open as a fragment ("Of each worker", "# as
                the last one's"), and words that another word says better ("anew", "in vain")
    types       errors that mypy reports, of rose/ and scripts/

Functions with a complexity above 15 are ruff's to refuse (C901 in pyproject.toml).
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

KINDS = ("lines", "functions", "files", "classes", "prose", "types")
MOST_LINES_OF_FUNCTION = 60
MOST_LINES_OF_FILE = 450
MOST_ATTRIBUTES = 20
_OPENERS = (
    "Of|What|Whether|Its|How|As|It|Where|Who|Whose|That|Those|These|This|So|And|But|For|From|By|"
    "With|Without|Between|Until|After|Before|Than|To|In|On|Else|Only|Also|Again|There|Here|Then|"
    "One|None|They|Them|Their"
)
_DOCSTRING = re.compile(rf"({_OPENERS})\b")
_COMMENT = re.compile(rf"({_OPENERS.lower()})\b")
_NOT_PROSE = ("noqa", "type:", "pragma")
# Words that CONTRIBUTING.md replaces, where a pattern finds them.
_WORDS = re.compile(
    r"\b(anew|(in )?vain|whoever|whomever|so (many|much) (?!as|that)|tells?|told|hears?|heard|"
    r"foretells?|foretold|br(eak|eaks|oken|oke) off|for want of|lest|(gives?|gave|given) back|"
    r"(takes?|took|taken) back|(comes?|came) to (an|its) end)\b",
    re.IGNORECASE,
)
_ERROR = re.compile(r"(?P<place>\S+\.py:\d+): error: (?P<what>.*)")


@dataclass(frozen=True)
class Finding:
    """`count` findings of one kind at a place (`rose/hub.py:17`), and what they are."""

    kind: str
    place: str
    what: str
    count: int = 1


def of_file(path: Path, repository: Path) -> Iterator[Finding]:
    """Yield the findings of a file, all kinds but types."""
    source = path.read_text(encoding="utf-8")
    name = str(path.relative_to(repository))
    tree = ast.parse(source)
    lines = len(source.splitlines())
    yield Finding("lines", name, f"{lines} lines", lines)
    if lines > MOST_LINES_OF_FILE:
        yield Finding("files", name, f"{lines} lines, at most {MOST_LINES_OF_FILE}")
    for node in ast.walk(tree):
        place = f"{name}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            if (length := node.end_lineno - node.lineno + 1) > MOST_LINES_OF_FUNCTION:
                what = f"{node.name} has {length} lines, at most {MOST_LINES_OF_FUNCTION}"
                yield Finding("functions", place, what)
        elif isinstance(node, ast.ClassDef) and (number := attributes(node)) > MOST_ATTRIBUTES:
            what = f"{node.name} has {number} attributes, at most {MOST_ATTRIBUTES}"
            yield Finding("classes", place, what)
    for line, text in prose(source, tree):
        yield Finding("prose", f"{name}:{line}", text)


def lines_of(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def attributes(node: ast.ClassDef) -> int:
    """Return how many attributes a class declares in its body or assigns to `self`."""
    names = {
        each.target.id
        for each in node.body
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
    }
    for each in ast.walk(node):
        if (
            isinstance(each, ast.Attribute)
            and isinstance(each.ctx, ast.Store)
            and isinstance(each.value, ast.Name)
            and each.value.id == "self"
        ):
            names.add(each.attr)
    return len(names)


def prose(source: str, tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield (line, text) of each fragment and of each text with a word that goes."""
    for line, text in _docstrings(tree):
        if _DOCSTRING.match(text):
            yield line, f"opens as a fragment: {text.splitlines()[0][:80]}"
        for found in _WORDS.finditer(text):
            yield line, f"{found[0]!r} in a docstring"
    for line, text, trailing in _comments(source):
        if trailing and _COMMENT.match(text):
            yield line, f"opens as a fragment: {text[:80]}"
        for found in _WORDS.finditer(text):
            yield line, f"{found[0]!r} in a comment"


def _docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(tree):
        if isinstance(node, documented) and (text := ast.get_docstring(node)):
            yield node.body[0].lineno, text


def _comments(source: str) -> Iterator[tuple[int, str, bool]]:
    """Yield (line, text, whether code stands before it) of each comment."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            text = token.string.lstrip("# ").strip()
            if text and not text.startswith(_NOT_PROSE):
                yield token.start[0], text, bool(token.line[: token.start[1]].strip())


def type_errors(repository: Path) -> list[Finding]:
    """Return what mypy reports of rose/ and scripts/, by its settings in pyproject.toml.

    Raises `RuntimeError` where mypy itself fails.
    """
    command = [sys.executable, "-m", "mypy", "--no-error-summary", "rose", "scripts"]
    done = subprocess.run(command, cwd=repository, capture_output=True, text=True)
    if done.returncode > 1 or done.stderr:
        raise RuntimeError(f"mypy failed: {(done.stderr or done.stdout).strip()}")
    found = map(_ERROR.match, done.stdout.splitlines())
    return [Finding("types", each["place"], each["what"]) for each in found if each]


def without_encoding(source: str) -> list[ast.Call]:
    """Return each call in `source` that opens, reads or writes a text file in the locale's
    encoding."""
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
