"""What is imported by name is there: also within functions, and in tests and scripts that only a
slow run imports."""

import ast
import functools
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
FILES = [p for folder in ("rose", "tests", "scripts") for p in (REPOSITORY / folder).rglob("*.py")]


def path_of(module: str) -> Path | None:
    """Of a module or package; None of a folder without __init__.py."""
    path = REPOSITORY / module.replace(".", "/")
    found = [one for one in (path.with_suffix(".py"), path / "__init__.py") if one.is_file()]
    return found[0] if found else None


@functools.cache
def read(path: Path) -> tuple[set[str], list[ast.ImportFrom]]:
    """(everything that is bound in a module, wherever in it; its imports from ROSE by name)."""
    bound, imports, left = set(), [], [ast.parse(path.read_text())]
    while left:
        node = left.pop()
        kind = type(node)
        if kind in (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef):
            bound.add(node.name)
        elif kind is ast.Name and type(node.ctx) is ast.Store:
            bound.add(node.id)
        elif kind is ast.ImportFrom and node.names[0].name == "*":
            bound |= read(path_of(node.module))[0]
        elif kind in (ast.Import, ast.ImportFrom):
            bound |= {(name.asname or name.name).split(".")[0] for name in node.names}
            ours = kind is ast.ImportFrom and not node.level
            if ours and node.module.partition(".")[0] in ("rose", "tests"):
                imports.append(node)
        if not isinstance(node, ast.expr) or kind in (ast.Tuple, ast.List, ast.Starred):
            left.extend(ast.iter_child_nodes(node))
    return bound, imports


def test_every_name_that_is_imported_from_rose_or_its_tests_is_there():
    missing = []
    for path in FILES:
        for node in read(path)[1]:
            where = path_of(node.module)
            known = read(where)[0] if where else set()
            missing += [
                f"{path.relative_to(REPOSITORY)}:{node.lineno}: {node.module}.{name.name}"
                for name in node.names
                if name.name not in known and path_of(f"{node.module}.{name.name}") is None
            ]
    assert not missing
