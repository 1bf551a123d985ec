"""Check that the house has not grown: `make lint` runs it and fails where a limit is exceeded.

    python scripts/house.py             compare each folder with its limits in scripts/house.toml
    python scripts/house.py --write     lower the limits to today's values
    python scripts/house.py --list KIND list every finding of one kind, as `functions` or `prose`

For each folder of rose/, for scripts/ and for tests/, house.toml has one limit per kind of finding
(scripts/house_kinds.py says what each kind counts). Lines are counted in files as ruff formats
them. A limit is raised by hand, in the commit that needs it: growth is a decision.

Three things have no limit but must not occur at all: modules or folders that import each other in a
circle, imports inside functions included; a text file that is opened without its encoding, which
would then be the locale's; and a limit in house.toml for a folder that is gone.
"""

from __future__ import annotations

import argparse
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path

import grimp
from rich.console import Console
from rich.table import Table

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from scripts import house_kinds as kinds

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


def sections() -> dict[str, list[Path]]:
    """Return the Python files of each folder that has limits, by the folder's path."""
    found: dict[str, list[Path]] = {}
    for path in sorted((REPOSITORY / "rose").rglob("*.py")):
        found.setdefault(_folder(path), []).append(path)
    for name in ("scripts", "tests"):
        found[name] = sorted((REPOSITORY / name).rglob("*.py"))
    return found


def _folder(path: Path) -> str:
    """Return the folder whose limits count for a file of rose/: a part has its own."""
    names = path.relative_to(REPOSITORY).parts
    depth = 3 if names[1] == "parts" else 2
    return "/".join(names[:depth]) if len(names) > depth else "rose"


def findings() -> dict[str, list[kinds.Finding]]:
    """Return what each folder holds of every kind that is counted."""
    typed = kinds.type_errors(REPOSITORY)
    found = {}
    for section, paths in sections().items():
        here = [each for path in paths for each in kinds.of_file(path, REPOSITORY)]
        if section == "tests":  # Their names are sentences, and their helpers are short.
            here = [each for each in here if each.kind == "lines"]
        names = {str(path.relative_to(REPOSITORY)) for path in paths}
        found[section] = here + [each for each in typed if each.place.split(":")[0] in names]
    return found


def counted(found: dict[str, list[kinds.Finding]]) -> Counts:
    """Sum the findings of each folder by kind."""
    counts: Counts = {}
    for section, each in found.items():
        here = counts[section] = dict.fromkeys(kinds.KINDS, 0)
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
        found[process] = sum(kinds.lines_of(each) for each in files if each.exists())
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
        for call in kinds.without_encoding(path.read_text(encoding="utf-8"))
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
    drawn = Table("", *kinds.KINDS, title="The house", title_justify="left", caption_justify="left")
    folders = {name: here for name, here in counts.items() if set(here) <= set(kinds.KINDS)}
    folders["all"] = {kind: sum(here[kind] for here in folders.values()) for kind in kinds.KINDS}
    for section, here in folders.items():
        drawn.add_row(section, *(f"{here[kind]:,}" for kind in kinds.KINDS))
    others = [
        f"{section}: {', '.join(f'{name} {count:,}' for name, count in here.items())}"
        for section, here in counts.items()
        if section not in folders
    ]
    drawn.caption = "\n".join(others)
    return drawn


def listed(found: dict[str, list[kinds.Finding]], wanted: Iterable[tuple[str, str]]) -> list[str]:
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
    parser.add_argument("--list", choices=kinds.KINDS, help="list all findings of this kind")
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
