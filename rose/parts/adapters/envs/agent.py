"""An agent's own program, one process for each trajectory, which calls the policy over an API.

Such an environment has no `reset` and `step`. The environment host starts the program and passes it
three things in environment variables: the address of the gateway (rose/parts/adapters/gateway), a
key and a task. This file has the arguments (env.args).
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import shlex
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rose import inputs, processes
from rose.config import ConfigError
from rose.files import json_lines
from rose.parts.adapters.envs import _source


class Agent:
    """A program: a `command` (a list, or a string that is split without a shell), or a `function`
    (`module:name` or `file.py:name`). A function is called in a Python process of its own.

    `reward`: a function of the conversations and the task, whose reward replaces the agent's.
    `tasks`: a JSONL file; each trajectory gets a line, and every second line is held out.
    `environment`: names of further variables that the program gets.
    `listen`: the address at which the gateway listens.
    Raises `ConfigError`.
    """

    requires_tool = False
    paths = ("function", "reward", "tasks")

    trajectory_player = "rose.parts.adapters.gateway.player:GatewayPlayer"

    def __init__(
        self,
        command: str | Sequence[str] | None = None,
        function: str | None = None,
        reward: str | None = None,
        tasks: str | None = None,
        environment: Sequence[str] = (),
        listen: str = "127.0.0.1",
    ):
        if (command is None) == (function is None):
            raise ConfigError(
                f"env.args.command={command!r}, env.args.function={function!r}: one of them is "
                'needed, as env.args.command="python agent.py" or env.args.function=my.agent:run'
            )
        self.command = None if command is None else _checked_command(command)
        self.function = None if function is None else _function_reference("function", function)
        self.reward = None if reward is None else _function_reference("reward", reward)
        self.doubt = ""
        self._place = tasks
        self._tasks = [] if tasks is None else _lines(tasks)
        if isinstance(environment, str) or not all(map(_is_name, environment)):
            raise ConfigError(
                f"env.args.environment={environment!r}: a list of variables' names, without values"
            )
        if both := _count_in_both(tasks) if tasks is not None else 0:
            self.doubt = (
                f"env.args.tasks={tasks!r}: {both} of the held-out tasks (every second line) "
                "are training tasks, too, so evaluation measures what was trained"
            )
        self.environment = tuple(environment)
        if not isinstance(listen, str) or not listen:
            raise ConfigError(f"env.args.listen={listen!r}: an address of this machine")
        self.listen = listen

    def verify(self) -> None:
        """Raise `ConfigError` if a file that each episode's process reads has been edited."""
        inputs.verify(*(self.command or ()), *filter(None, (self.function, self.reward)))

    def task_name(self, seed: int) -> str:
        if not self._tasks:
            return ""
        at = seed // 2 % len(self._tasks[seed % 2 :: 2])
        return f"task {2 * at + seed % 2 + 1} of {self._place}"

    def task(self, seed: int) -> dict[str, Any]:
        """Return the content of the file ROSE_TASK for the episode of this seed."""
        task: dict[str, Any] = {"seed": seed}
        if self._tasks:  # lines of the seed's parity, as odd seeds are held out
            lines = self._tasks[seed % 2 :: 2]
            task["task"] = lines[seed // 2 % len(lines)]
        return task


def _is_name(variable: Any) -> bool:
    return isinstance(variable, str) and bool(variable) and "=" not in variable


def _checked_command(command: Any) -> list[str]:
    try:
        argv = shlex.split(command) if isinstance(command, str) else list(command)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"env.args.command={command!r}: {error}") from None
    if not argv or not all(isinstance(each, str) for each in argv):
        raise ConfigError(f"env.args.command={command!r}: a program and its arguments are needed")
    if shutil.which(argv[0], path=processes.search_path()) is None:
        raise ConfigError(
            f"env.args.command={command!r}: no program {argv[0]!r} on PATH or at that path"
        )
    _source.check_script(argv, f"env.args.command={command!r}")
    return argv


def _function_reference(key: str, name: Any) -> str:
    """Check the value of env.args.`key` and return it, with an absolute path if it names a file.
    Nothing is imported. A module in the working folder is accepted, too. Raises `ConfigError`."""
    where = f"env.args.{key}={name!r}"
    place, _, function = name.rpartition(":") if isinstance(name, str) else ("", "", "")
    if not place or not function.isidentifier():
        raise ConfigError(f"{where}: package.module:function or file.py:function is needed")
    if place.endswith(".py"):
        if not Path(place).is_file():
            raise ConfigError(f"{where}: no file {place} in {os.getcwd()}")
        _source.check_name(Path(place).resolve(), function, where)
        return f"{Path(place).resolve()}:{function}"
    if not all(map(str.isidentifier, place.split("."))):
        raise ConfigError(
            f"{where}: {place!r} is no module; a file is named as {place}.py:{function}"
        )
    top = place.partition(".")[0]
    if importlib.util.find_spec(top) is None and not list(Path.cwd().glob(f"{top}*")):
        raise ConfigError(f"{where}: no Python package {top!r} is installed")
    _source.check_module(place, function, where)
    return name


@functools.lru_cache(8)
def _count_in_both(path: str) -> int:
    """Return the number of held-out tasks that are also training tasks."""
    train, held_out = ([json.dumps(t, sort_keys=True) for t in _lines(path)[k::2]] for k in (0, 1))
    trained = set(train)
    return sum(task in trained for task in held_out)


@functools.lru_cache(8)  # a cache because each trajectory builds an `Agent`
def _lines(path: str) -> list[Any]:
    inputs.verify(path)
    try:
        tasks = json_lines(path)
    except (OSError, TypeError, ValueError) as error:
        raise ConfigError(f"env.args.tasks={path!r}: {error}") from None
    if len(tasks) < 2:
        raise ConfigError(f"env.args.tasks={path!r}: {len(tasks)} tasks; at least 2 are needed")
    return tasks
