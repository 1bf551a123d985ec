"""The configuration of the serving side.

A borrowed rank uses its run's configuration, with overrides for its own machine. The online server
runs before there is a run, so it uses conf/serving/borrow.yaml of this repository, with the command
line over it.
"""

from __future__ import annotations

import difflib
import json
from pathlib import Path
from typing import Any

import msgspec
import yaml

from rose import config as configuration
from rose import places
from rose.config import Config, ConfigError, Serving
from rose.processes import cores

DEFAULTS = places.CONF / "serving" / "borrow.yaml"

# Keys that a borrowed rank may override. All others are the run's, because with other values the
# tokens would come from another policy.
MAY_DIFFER = (
    "rollout.",
    "serving.",
    "cluster.",
    "observe.",
    "model.path",
    "transfer.relay",
    "transfer.threads",
    "transfer.stage_gib",
    "transfer.stage_device_gib",
    "transfer.verify_every",
    "transfer.load_timeout_s",
)
OPEN = (["env"], ["join_env"], ["engine_args"], ["hours"])  # sections without a fixed set of keys
MAY_BE_NULL = ("serving.online.slo",)  # sections that setting one of their keys creates
# Keys under MAY_DIFFER that may not be overridden.
FIXED = ("rollout.temperature", "rollout.top_p", "rollout.top_k", "rollout.group_size")


def parse(arguments: list[str]) -> dict[str, Any]:
    """Parse ["a.b=1", ...] into {"a.b": 1}, with values as in YAML. Raises `ConfigError`."""
    found = {}
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if not equals or not key:
            raise ConfigError(
                f"{argument!r}: must be key=value, as name=frozenlake or rollout.threads=2"
            )
        try:
            found[key] = yaml.safe_load(value) if value else ""
        except yaml.YAMLError:
            raise ConfigError(f"{argument!r}: the value is no YAML") from None
    return found


def of_run(run_dir: Path, arguments: list[str]) -> Config:
    """Return the run's stored configuration with `arguments` over it. Raises `ConfigError`."""
    path = Path(run_dir) / "config.json"
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: no configuration of a run ({error})") from None
    for key, value in parse(arguments).items():
        if not key.startswith(MAY_DIFFER) or key in FIXED:
            raise ConfigError(
                f"{key}={value!r}: is the run's; a serving rank may set rollout.* (not sampling), "
                "serving.*, cluster.*, observe.*, model.path and transfer.relay, relay_token_file, "
                "threads, stage_gib, stage_device_gib, verify_every and load_timeout_s"
            )
        _set(tree, key, value, str(path))
        if key == "model.path" and tree["model"]["source"] == "hub":
            # The path is this node's copy of the model, not the snapshot in the run's cache.
            tree["model"]["source"] = "folder"
    given = "rollout.threads" in parse(arguments)
    return _on_own_cores(configuration.from_dict(tree), given)


def _on_own_cores(c: Config, given: bool) -> Config:
    """Lower rollout.threads to the number of this process's cores, unless the command line set it.
    The run's number was chosen for the launcher's machine."""
    threads = c.rollout.threads
    if given or threads is None or c.cluster.gpus:
        return c
    rollout = msgspec.structs.replace(c.rollout, threads=min(threads, cores()))
    return msgspec.structs.replace(c, rollout=rollout)


def of_server(arguments: list[str]) -> Serving:
    """Return the defaults with the `serving.*` of `arguments` over them. Raises `ConfigError`."""
    tree = {"serving": yaml.safe_load(DEFAULTS.read_text(encoding="utf-8"))}
    for key, value in parse(arguments).items():
        if key.startswith("serving."):
            _set(tree, key, value, "conf/serving")
    return configuration.serving_from_dict(tree)


def _set(tree: dict[str, Any], key: str, value: Any, where: str) -> None:
    """Set a key that the tree already has, in place. Raises `ConfigError` for an unknown key.
    Sections in OPEN and MAY_BE_NULL accept any key; the conversion of the tree rejects wrong keys
    of the latter."""
    *sections, last = key.split(".")
    branch: Any = tree
    for depth, section in enumerate(sections, 1):
        if (
            isinstance(branch, dict)
            and branch.get(section) is None
            and ".".join(sections[:depth]) in MAY_BE_NULL
        ):
            branch[section] = {}
        branch = branch.get(section) if isinstance(branch, dict) else None
    open_here = sections[-1:] in OPEN or ".".join(sections) in MAY_BE_NULL
    if not isinstance(branch, dict) or last not in branch and not open_here:
        near = difflib.get_close_matches(key, configuration.keys(), n=1, cutoff=0.75)
        raise ConfigError(
            f"{key}: no such key in {where}" + (f"; did you mean {near[0]}?" if near else "")
        )
    branch[last] = value
