"""Calls a Python function as an agent's program, or as its reward.

    python -m rose.agent.gateway.call module:function             an agent
    python -m rose.agent.gateway.call file.py:function FILE       its reward, from the transcript

An agent's function gets the task, the object in the file ROSE_TASK; what it returns, unless None,
is the reward. A reward's function gets the conversations of FILE and the task. Either may be async.
Imports nothing of ROSE but this: the function's own packages take long enough.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import inspect
import json
import os
import sys
from pathlib import Path
from typing import Any


def find(name: str) -> Any:
    """The function `module:function` or `file.py:function`. Raises ImportError, AttributeError."""
    place, _, function = name.rpartition(":")
    if not place.endswith(".py"):
        sys.path.insert(0, os.getcwd())
        return getattr(importlib.import_module(place), function)
    sys.path.insert(0, str(Path(place).parent))
    spec = importlib.util.spec_from_file_location(Path(place).stem, place)
    if spec is None or not Path(place).is_file():
        raise ImportError(f"{place}: no such Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return getattr(module, function)


def main(arguments: list[str]) -> None:
    name, *transcript = arguments
    function = find(name)
    task = json.loads(Path(os.environ["ROSE_TASK"]).read_text())
    given = [json.loads(Path(path).read_text()) for path in transcript]
    result = function(*given, task)
    if inspect.isawaitable(result):
        result = asyncio.run(_wait(result))
    if result is not None:
        Path(os.environ["ROSE_REWARD"]).write_text(json.dumps(result))


async def _wait(result: Any) -> Any:
    return await result


if __name__ == "__main__":
    main(sys.argv[1:])
