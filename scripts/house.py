"""Check that the house has not grown: `make lint` runs it and fails where a limit is exceeded.

    python scripts/house.py             compare each folder with its limits in scripts/house.toml
    python scripts/house.py --write     lower the limits to today's values
    python scripts/house.py --list KIND list every finding of one kind

For each folder of rose/, for scripts/ and for tests/, house.toml has one limit per kind of finding:

    lines       lines of Python, in files as ruff formats them
    functions   functions longer than MOST_LINES_OF_FUNCTION lines
    files       files longer than MOST_LINES_OF_FILE lines
    classes     classes with more than MOST_ATTRIBUTES attributes
    prose       docstrings and trailing comments that open as a fragment ("Of each worker", "# as
                the last one's"), and words that another word says better ("anew", "in vain")
    types       errors that mypy reports, of rose/ and scripts/

A limit is raised by hand, in the commit that needs it: growth is a decision. Functions with a
complexity above 15 are ruff's to refuse (C901 in pyproject.toml).

Three things have no limit but must not occur at all: modules or folders that import each other in a
circle, imports inside functions included; a text file that is opened without its encoding, which
would then be the locale's; and a limit in house.toml for a folder that is gone.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import subprocess
import sys
import tokenize
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import grimp
from rich.console import Console
from rich.table import Table

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

LIMITS = Path(__file__).with_suffix(".toml")
LINES_STEP = 50  # Limits of lines are rounded up to it, so that a small mend needs no new limit.
# The modules that the five processes of a run start from.
PROCESSES = {
    "front door": "rose.front",
    "coordinator": "rose.coordinator.coordinator",
    "environment host": "rose.agent.process",
    "trainer": "rose.trainer.rank",
    "engine": "rose.engine.rank",
}
# A model that these scripts made is named by their content: an edit makes everybody's again.
RECIPES = ("make_tiny_model.py", "make_smollm2.py")

Counts = dict[str, dict[str, int]]  # section -> name -> count
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
    declared = [each.target for each in node.body if isinstance(each, ast.AnnAssign)]
    names = {each.id for each in declared if isinstance(each, ast.Name)}
    stored = [each for each in ast.walk(node) if isinstance(each, ast.Attribute)]
    stored = [each for each in stored if isinstance(each.ctx, ast.Store)]
    return len(names | {each.attr for each in stored if getattr(each.value, "id", "") == "self"})


def prose(source: str, tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield (line, text) of each fragment and of each text with a word that goes."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in ast.walk(tree) if isinstance(node, documented)]
    found = [(node.body[0].lineno, text) for node in nodes if (text := ast.get_docstring(node))]
    for line, text in found:
        if _DOCSTRING.match(text):
            yield line, f"opens as a fragment: {text.splitlines()[0][:80]}"
        yield from ((line, f"{word[0]!r} in a docstring") for word in _WORDS.finditer(text))
    for line, text, trailing in _comments(source):
        if trailing and _COMMENT.match(text):
            yield line, f"opens as a fragment: {text[:80]}"
        yield from ((line, f"{word[0]!r} in a comment") for word in _WORDS.finditer(text))


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


def sections() -> dict[str, list[Path]]:
    """Return the Python files of each folder that has limits, by the folder's path."""
    found: dict[str, list[Path]] = {}
    for path in sorted((REPOSITORY / "rose").rglob("*.py")):
        names = path.relative_to(REPOSITORY).parts
        depth = 3 if names[1] == "parts" else 2  # a part has limits of its own
        folder = "/".join(names[:depth]) if len(names) > depth else "rose"
        found.setdefault(folder, []).append(path)
    for name in ("scripts", "tests"):
        found[name] = sorted((REPOSITORY / name).rglob("*.py"))
    return found


def findings() -> dict[str, list[Finding]]:
    """Return what each folder holds of every kind that is counted."""
    typed = type_errors(REPOSITORY)
    found = {}
    for section, paths in sections().items():
        here = [each for path in paths for each in of_file(path, REPOSITORY)]
        if section == "tests":  # Their names are sentences, and their helpers are short.
            here = [each for each in here if each.kind == "lines"]
        names = {str(path.relative_to(REPOSITORY)) for path in paths}
        found[section] = here + [each for each in typed if each.place.split(":")[0] in names]
    return found


def counted(found: dict[str, list[Finding]]) -> Counts:
    """Sum the findings of each folder by kind."""
    counts: Counts = {}
    for section, each in found.items():
        here = counts[section] = dict.fromkeys(KINDS, 0)
        for finding in each:
            here[finding.kind] += finding.count
    return counts


def closures() -> dict[str, int]:
    """Return the lines that each process imports, imports inside functions included."""
    graph = grimp.build_graph("rose", cache_dir=None)
    found = {}
    for process, module in PROCESSES.items():
        modules = {module} | graph.find_upstream_modules(module)
        paths = (REPOSITORY.joinpath(*each.split(".")) for each in modules)
        files = (p / "__init__.py" if p.is_dir() else p.with_suffix(".py") for p in paths)
        found[process] = sum(lines_of(each) for each in files if each.exists())
    return found


def config_keys() -> int:
    """Return the number of keys in the configuration of the default run."""
    from rose.front import compose

    def leaves(value: object) -> int:
        return sum(map(leaves, value.values())) if isinstance(value, dict) and value else 1

    [tree] = compose(REPOSITORY / "conf", [])
    return leaves(tree)


def circles() -> list[str]:
    """Return the imports that close a circle between the children of any folder of rose/."""
    graph = grimp.build_graph("rose", cache_dir=None)
    found = []
    for package in ["rose", *(m for m in graph.modules if graph.find_children(m) and m != "rose")]:
        for one, other in graph.nominate_cycle_breakers(package):
            found.append(f"{one} imports {other}, which closes a circle")
    return found


def unencoded() -> list[str]:
    """Return each place in rose/ and scripts/ that opens a text file without its encoding."""
    return [
        f'{path.relative_to(REPOSITORY)}:{call.lineno}: encoding="utf-8" is missing'
        for folder in ("rose", "scripts")
        for path in sorted((REPOSITORY / folder).rglob("*.py"))
        if path.name not in RECIPES
        for call in without_encoding(path.read_text(encoding="utf-8"))
    ]


def exceeded(counts: Counts, limits: Counts) -> list[tuple[str, str, int, int]]:
    """Return (section, name, count, limit) where the count is above its limit; no limit is 0."""
    return [
        (section, name, count, limit)
        for section, here in counts.items()
        for name, count in here.items()
        if count > (limit := limits.get(section, {}).get(name, 0))
    ]


def lowered(counts: Counts, limits: Counts) -> Counts:
    """Return the limits brought down to `counts`; a folder without limits gets today's."""

    def limit(section: str, name: str, count: int) -> int:
        if name == "lines" or section == "closures":
            count = -(-count // LINES_STEP) * LINES_STEP
        return min(count, limits.get(section, {}).get(name, count))

    return {
        section: {name: limit(section, name, count) for name, count in here.items()}
        for section, here in counts.items()
    }


def written(limits: Counts) -> str:
    """Return the text of house.toml."""
    text = ["# Limits of `make lint`: see scripts/house.py, whose --write lowers them.", ""]
    for section, here in limits.items():
        text.append(f"[{_key(section)}]")
        text += [f"{_key(name)} = {count}" for name, count in here.items()]
        text.append("")
    return "\n".join(text)


def _key(name: str) -> str:
    return name if name.isidentifier() else f'"{name}"'


def table(counts: Counts) -> Table:
    """Draw the folders' counts, and below them those that are of no folder."""
    drawn = Table("", *KINDS, title="The house", title_justify="left", caption_justify="left")
    folders = {name: here for name, here in counts.items() if set(here) <= set(KINDS)}
    folders["all"] = {kind: sum(here[kind] for here in folders.values()) for kind in KINDS}
    for section, here in folders.items():
        drawn.add_row(section, *(f"{here[kind]:,}" for kind in KINDS))
    others = [
        f"{section}: {', '.join(f'{name} {count:,}' for name, count in here.items())}"
        for section, here in counts.items()
        if section not in folders
    ]
    drawn.caption = "\n".join(others)
    return drawn


def listed(found: dict[str, list[Finding]], wanted: Iterable[tuple[str, str]]) -> list[str]:
    """Return one line for each finding of the wanted (section, kind)s, the largest first."""
    lines = []
    for section, kind in wanted:
        here = [each for each in found.get(section, ()) if each.kind == kind]
        here.sort(key=lambda each: (-each.count, each.place))
        lines += [f"{each.place}: {each.what}" for each in here]
    return lines


def main(arguments: list[str]) -> int:
    """Return 1 where a limit is exceeded."""
    parser = argparse.ArgumentParser(description="Compare the folders' sizes with their limits.")
    parser.add_argument("--write", action="store_true", help="lower the limits to today's values")
    parser.add_argument("--list", choices=KINDS, help="list all findings of this kind")
    args = parser.parse_args(arguments)
    found = findings()
    if args.list:
        print(*listed(found, ((section, args.list) for section in found)), sep="\n")
        return 0
    counts = counted(found)
    counts["closures"], counts["config"] = closures(), {"keys of the default run": config_keys()}
    limits = tomllib.loads(LIMITS.read_text(encoding="utf-8")) if LIMITS.exists() else {}
    if args.write:
        limits = lowered(counts, limits)
        LIMITS.write_text(written(limits), encoding="utf-8")
    Console(width=max(Console().width, 110)).print(table(counts))
    above = exceeded(counts, limits)
    wrong = listed(found, [(section, name) for section, name, *_ in above if name != "lines"])
    wrong += circles() + unencoded()
    wrong += [f"house.toml: [{each}] is no folder" for each in limits if each not in counts]
    wrong += [
        f"{section}: {count:,} {name}, at most {limit:,} (scripts/house.toml)"
        for section, name, count, limit in above
    ]
    print(*wrong, sep="\n", end="\n" if wrong else "")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
