"""The names of vLLM's engine arguments, read from its source.

Importing vLLM would take seconds, and the launcher needs nothing else of it. The arguments' types
are not read: vLLM checks them when an engine starts.
"""

from __future__ import annotations

import ast
import difflib
import importlib.util
from pathlib import Path

from rose.config import Config, ConfigError

FILE = "engine/arg_utils.py"
CLASSES = ("EngineArgs", "AsyncEngineArgs")


def names() -> set[str]:
    """Return the argument names of the installed vLLM; empty without vLLM, or without `FILE` in
    it."""
    spec = importlib.util.find_spec("vllm")
    folders = (spec and spec.submodule_search_locations) or ()
    files = [path for folder in folders if (path := Path(folder) / FILE).is_file()]
    found: set[str] = set()
    for node in ast.parse(files[0].read_bytes()).body if files else ():
        if isinstance(node, ast.ClassDef) and node.name in CLASSES:
            fields = (line for line in node.body if isinstance(line, ast.AnnAssign))
            found |= {f.target.id for f in fields if isinstance(f.target, ast.Name)}
    return found


def check(c: Config) -> None:
    """Raise `ConfigError` for an argument in rollout.engine_args that vLLM doesn't have. A job in a
    container is not checked, because it uses the container's vLLM."""
    given = c.rollout.engine_args
    known = names() if given and not c.cluster.contained else set()
    for name, value in given.items() if known else ():
        if name in known:
            continue
        near = difflib.get_close_matches(name.replace("-", "_"), known, n=3, cutoff=0.7)
        meant = f"did you mean {' or '.join(near)}?" if near else "leave it out"
        raise ConfigError(
            f"rollout.engine_args.{name}={value!r}: vLLM has no such argument; {meant}"
        )
