"""Any installed environment of `verifiers` 0.4 (Prime Intellect), and so of its Environments Hub.

The library's pins conflict with ROSE's, so it has a virtual environment of its own. The Python of
that environment plays the episodes: each environment host has a process
(rose/parts/adapters/gateway/players.py) that runs `_verifiers_player.py`. This process calls the
policy at the gateway. The reward is the rubric's. Episodes can't train more than one role.
"""

from __future__ import annotations

import functools
import json
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta

from rose import inputs, processes
from rose.config import ConfigError
from rose.parts.adapters.envs.agent import Agent

PLAYER = Path(__file__).with_name("_verifiers_player.py")
LOAD_S = 600.0  # seconds to import the library and load an environment's data, maybe a download
OUTPUT_CHARACTERS = 1000  # characters from the end of a process's output, in an error


class Verifiers(Agent):
    """`python`: path of the Python in the library's virtual environment. `id`: the environment's
    module. `args`: its taskset's settings; `env`: other settings of the library's EnvConfig.
    `held_out`: the share of tasks for evaluation, or the settings in which their `args` differ.
    `most_tasks`: the most tasks that are read, as a taskset may be endless.
    `renderer`: None lets ROSE render and read messages (chat completions). A map such as
    {name: qwen3} lets the library do so; it then calls the token route.
    `success_at`: the least reward of a success. `environment`: names of further variables that the
    process gets. `listen`: the address at which the gateway listens. Raises `ConfigError`."""

    paths = ("python",)

    def __init__(
        self,
        python: str,
        id: str,
        args: dict[str, Any] | None = None,
        held_out: float | dict[str, Any] = 0.1,
        env: dict[str, Any] | None = None,
        most_tasks: Annotated[int, Meta(ge=2)] = 10_000,
        renderer: dict[str, Any] | None = None,
        success_at: float = 1.0,
        environment: Sequence[str] = (),
        listen: str = "127.0.0.1",
    ):
        if (found := shutil.which(python)) is None:
            raise ConfigError(
                f"env.args.python={python!r}: no such program; the python of the library's virtual "
                "environment, as /path/of/venv/bin/python"
            )
        # -P keeps this file's folder, whose files have names of packages, off the import path.
        super().__init__([found, "-P", str(PLAYER)], environment=environment, listen=listen)
        if not id:
            raise ConfigError(f"env.args.id={id!r}: the name of a verifiers environment")
        share = isinstance(held_out, float) and 0 < held_out < 1
        if not share and not (isinstance(held_out, dict) and held_out):
            raise ConfigError(
                f"env.args.held_out={held_out!r}: a share of the tasks above 0 and below 1, or a "
                "map of what differs in env.args.args, as {split: test}"
            )
        self.success_at = success_at
        self.settings = json.dumps(
            {
                "id": id,
                "args": args or {},
                "held_out": held_out,
                "env": env or {},
                "most_tasks": most_tasks,
                "renderer": renderer,
            }
        )
        self.tasks = _load(tuple(self.command), self.settings, self.environment)
        whose = f"the tasks of {id} with {args or {}}, {held_out} of them held out"
        inputs.note("env.args.id", whose, self.tasks["tasks"])


# Cached, because each trajectory builds an environment.
@functools.cache
def _load(command: tuple[str, ...], settings: str, given: tuple[str, ...]) -> dict[str, Any]:
    """Return the numbers of training and held-out tasks, and a digest of all tasks. Raises
    `ConfigError` that names the setting that can't be used."""
    python, values = command[0], json.loads(settings)
    try:
        done = subprocess.run(
            command,
            input=f"{settings}\n",
            # Sets of texts have the same order in each process, as in an environment's workers.
            env=processes.bare_environment(given) | {"PYTHONHASHSEED": "0"},
            capture_output=True,
            text=True,
            timeout=LOAD_S,
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"env.args.id={values['id']!r}: {python} did not load it within {LOAD_S:g} s; does "
            "its data need a server that can't be reached?"
        ) from None
    try:
        answer = json.loads(done.stdout)
    except ValueError:
        raise ConfigError(
            f"env.args.python={python!r}: must be a Python from 3.11 with verifiers 0.4; it ended "
            f"with code {done.returncode}: {done.stderr.strip()[-OUTPUT_CHARACTERS:]}"
        ) from None
    if "error" in answer:
        values["python"], key = python, answer["key"]
        raise ConfigError(f"env.args.{key}={values[key]!r}: {answer['error']}")
    return answer
