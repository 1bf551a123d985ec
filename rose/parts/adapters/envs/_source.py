"""Checks of Python files that other processes run, without running them.

An agent's program may need packages that the launcher's Python lacks, so nothing is imported here.
If a check can't decide for certain, it passes.
"""

from __future__ import annotations

import ast
import functools
import os
import re
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

from rose import inputs
from rose.config import ConfigError

# A module that uses one of these may define names that no statement shows.
DYNAMIC = {"globals", "locals", "vars", "exec", "eval", "setattr", "__dict__", "modules"}
PYTHON = re.compile(r"python(3(\.\d+)?)?")
HOLDERS = ("asname", "name", "rest")  # attributes of syntax nodes that bind a name
SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
FLAGS = re.compile(r"-[bBdEiIOPqsSuvx]+")  # options of Python without a value
WITH_VALUE = ("-W", "-X")  # options of Python whose value may be the next word


@functools.lru_cache(32)  # a cache because each trajectory builds an environment
def check_name(file: Path, name: str, where: str) -> None:
    """Raise `ConfigError` if `file` isn't valid Python, or doesn't define `name` at its top level.
    `where`: the setting KEY=VALUE that names both."""
    inputs.verify(file)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # The process that runs the file prints its warnings.
            tree = ast.parse(file.read_bytes(), str(file))
            compile(tree, str(file), "exec", dont_inherit=True)  # errors that ast.parse misses
    except OSError as error:
        raise ConfigError(f"{where}: {file} can't be read: {error.strerror}") from None
    except (ValueError, SyntaxError) as error:
        line = getattr(error, "lineno", None)
        raise ConfigError(
            f"{where}: {file}{f', line {line}' if line else ''} is no Python "
            f"{sys.version.split()[0]}: {getattr(error, 'msg', None) or error}"
        ) from None
    found = _defined(tree)
    if found is not None and name not in found:
        functions = [each.name for each in tree.body if isinstance(each, SCOPES[:2])]
        raise ConfigError(
            f"{where}: {file} defines no {name} at its top level; its functions are "
            f"{', '.join(functions) or 'none':.200}"
        )


def check_module(module: str, name: str, where: str) -> None:
    """Apply `check_name` to the file of a module, if exactly one file can be the module. The
    program's process searches the working folder first."""
    stem = module.replace(".", "/")
    ends = (f"{stem}.py", f"{stem}/__init__.py")
    files = {place.resolve() for place in map(Path, ends) if place.is_file()}
    if not files or module.partition(".")[0] in sys.stdlib_module_names:
        places = [Path(folder, end) for folder in ("", *sys.path) for end in ends]
        files = {place.resolve() for place in places if place.is_file()}
    if len(files) == 1:
        check_name(files.pop(), name, where)


def check_script(argv: Sequence[str], where: str) -> None:
    """Raise `ConfigError` if a command has Python run a missing file. Programs start in the folder
    of the launch. If the file's folder is missing, too, the file may be in a container or on a disk
    of the nodes, and the check passes. `where`: the setting KEY=VALUE with the command."""
    script = _script(argv)
    seen = not os.path.isabs(script) or Path(script).parent.exists()
    if script.endswith(".py") and seen and not Path(script).exists():
        there = "" if os.path.isabs(script) else f" in {os.getcwd()}, where the program will start"
        raise ConfigError(f"{where}: there is no file {script}{there}")


def _script(argv: Sequence[str]) -> str:
    """Return the file that a command has Python run; "" if there is none, or if it isn't clear."""
    if argv[0] != sys.executable and not PYTHON.fullmatch(os.path.basename(argv[0])):
        return ""
    words = iter(argv[1:])
    for word in words:
        if not word.startswith("-"):
            return word
        if word in WITH_VALUE:
            next(words, "")
        elif not FLAGS.fullmatch(word) and not word.startswith(WITH_VALUE):
            return ""  # -c, -m, - and options that are not known here
    return ""


def _defined(tree: ast.Module) -> set[str] | None:
    """Return the names that statements outside of functions and classes bind, also within `if` or
    `try`. None if the module may define further names."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if getattr(node, "id", getattr(node, "attr", "")) in DYNAMIC:
            return None
        found |= set(node.names) if isinstance(node, ast.Global) else set()
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        # Imports, definitions, `except` and patterns hold a name as text.
        bound = next(filter(None, (getattr(node, each, "") for each in HOLDERS)), "")
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            bound = node.id
        found |= {bound.partition(".")[0]} if isinstance(bound, str) else set()
        if not isinstance(node, SCOPES):
            waiting += ast.iter_child_nodes(node)
    return None if {"*", "__getattr__"} & found else found
