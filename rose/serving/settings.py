"""The configuration of a serving rank: its run's own, with what differs on the serving side."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from rose import config as configuration
from rose.config import Config, ConfigError

# What an engine elsewhere may do differently; all else is the run's, or the tokens would be another policy's.
MAY_DIFFER = ("rollout.", "serving.", "cluster.", "observe.", "model.path")
OPEN = (["env"], ["join_env"], ["engine_args"])  # sections without a fixed set of keys
FIXED = ("rollout.temperature", "rollout.top_p", "rollout.top_k", "rollout.group_size")


def parse(arguments: list[str]) -> dict[str, Any]:
    """["a.b=1", ...] -> {"a.b": 1}, values as in YAML. Raises `ConfigError`."""
    found = {}
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if not equals or not key:
            raise ConfigError(f"{argument!r}: must be key=value, as name=frozenlake or rollout.threads=2")
        try:
            found[key] = yaml.safe_load(value) if value else ""
        except yaml.YAMLError:
            raise ConfigError(f"{argument!r}: the value is no YAML") from None
    return found


def of_run(run_dir: Path, arguments: list[str]) -> Config:
    """The run's stored configuration with `arguments` over it. Raises `ConfigError` naming the key or the file."""
    path = Path(run_dir) / "config.json"
    try:
        tree = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: no configuration of a run ({error})") from None
    for key, value in parse(arguments).items():
        if not key.startswith(MAY_DIFFER) or key in FIXED:
            raise ConfigError(f"{key}={value!r}: is the run's; a serving rank may set rollout.* (not sampling), "
                              "serving.*, cluster.*, observe.* and model.path")
        *sections, last = key.split(".")
        branch = tree
        for section in sections:
            branch = branch.get(section) if isinstance(branch, dict) else None
        if not isinstance(branch, dict) or last not in branch and sections[-1:] not in OPEN:
            raise ConfigError(f"{key}: no such key in {path}")
        branch[last] = value
    return configuration.from_dict(tree)
