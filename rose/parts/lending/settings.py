"""The configuration of the serving side.

A borrowed rank uses its run's configuration, the sections of conf/lending and overrides for its own
machine. The online server may start before the run. So it uses conf/serving/borrow.yaml of this
repository and conf/lending, overridden by the command line.
"""

from __future__ import annotations

import difflib
import os
import re
from pathlib import Path
from typing import Any, cast

import msgspec
import yaml

from rose import config as configuration
from rose import extensions, places
from rose.config import ConfigError, errors
from rose.engine import start
from rose.parts.lending.config import Config, MixedConfig, Online, Serving, ServingSide, check
from rose.processes import cores

# Keys that a borrowed rank may override. All others must be as in the run; otherwise the tokens
# would come from another policy.
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
MAY_BE_NULL = ("serving.online.slo",)  # null sections, created when one of their keys is set
# Keys of our commands whose values are always texts, even if they look like a number or a date.
TEXTS = ("name", "output_dir", "model", "out")
QUOTED = re.compile(r"(['\"])(.*)\1", re.DOTALL)  # a text in quotes
# Keys under MAY_DIFFER that may not be overridden.
FIXED = ("rollout.temperature", "rollout.top_p", "rollout.top_k", "rollout.group_size")


def parse(arguments: list[str]) -> dict[str, Any]:
    """Parse ["a.b=1", ...] into {"a.b": 1}, with values as in YAML. Raises `ConfigError`. Values of
    `TEXTS` stay texts; as in launch.py, quotes around them are removed. A leading ~/ becomes the
    home folder, because shells leave it after a `=`."""
    found = {}
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if not equals or not key:
            raise ConfigError(
                f"{argument!r}: must be key=value, as name=frozenlake or rollout.threads=2"
            )
        if key in TEXTS and (quoted := QUOTED.fullmatch(value)):
            value = quoted[2]
        if value.startswith("~/"):
            value = os.path.expanduser(value)
        try:
            found[key] = yaml.safe_load(value) if value and key not in TEXTS else value
        except (yaml.YAMLError, ValueError):  # ValueError: an impossible date, such as 2026-02-30
            raise ConfigError(
                f"{argument!r}: the value is no YAML; a text may be quoted, as {key}='\"...\"'"
            ) from None
    return found


def of_run(run_dir: Path, arguments: list[str]) -> Config:
    """Return the run's stored configuration, overridden by `arguments`. Raises `ConfigError`."""
    path = Path(run_dir) / "config.json"
    tree = configuration.stored(path) if path.is_file() else {}
    if not isinstance(tree.get("model"), dict) or not isinstance(tree.get("serving"), dict):
        raise ConfigError(f"{path}: no configuration of a run; give that of a folder outputs/NAME")
    given = parse(arguments)
    for key, value in given.items():
        if not key.startswith(MAY_DIFFER) or key in FIXED:
            raise ConfigError(
                f"{key}={value!r}: is the run's; a serving rank may set rollout.* (not sampling), "
                "serving.*, cluster.*, observe.*, model.path and transfer.relay, relay_token_file, "
                "threads, stage_gib, stage_device_gib, verify_every and load_timeout_s"
            )
    if "model.path" in given and tree["model"]["source"] == "hub":
        # The path is this node's copy of the model, not the snapshot in the run's cache.
        tree["model"]["source"] = "folder"
    return _on_own_cores(of_tree(tree, given, str(path)), "rollout.threads" in given)


def composed(overrides: list[str]) -> Config:
    """Compose conf/ with `overrides`, and add this part's sections. Raises `ConfigError`."""
    from hydra import compose, initialize_config_dir

    from rose.launch import errors as complaints

    conf = places.CONF
    ours = [a for a in overrides if extensions.of_a_command(a.partition("=")[0])]
    of_runs = [a for a in overrides if a not in ours]
    try:
        with initialize_config_dir(str(conf), version_base="1.3"):
            tree = complaints.to_tree(compose("config", of_runs))
    except complaints.COMPLAINTS as error:
        raise ConfigError(complaints.explain(error, conf, of_runs)) from None
    return of_tree(tree, parse(ours), str(conf))


def of_tree(tree: dict[str, Any], given: dict[str, Any], where: str) -> Config:
    """Convert a run's tree, with this part's sections added and the values `given` set. `where`
    names the tree in errors. Raises `ConfigError`."""
    tree["serving"] |= _defaults("lending/default")
    for key, value in given.items():
        _set(tree, key, value, where)
    found = cast(Config, configuration.from_dict(tree, kinds=(Config, MixedConfig)))
    check(found.serving)
    return found


def _on_own_cores(c: Config, given: bool) -> Config:
    """Lower rollout.threads to the number of this process's cores, unless the command line set it.
    The run's number was chosen for the launcher's machine."""
    threads = c.rollout.threads
    if given or threads is None or c.cluster.gpus:
        return c
    rollout = msgspec.structs.replace(c.rollout, threads=min(threads, cores()))
    return msgspec.structs.replace(c, rollout=rollout)


def of_server(arguments: list[str]) -> Serving:
    """Return the section `serving` of an online server: defaults, overridden by the `serving.*` of
    `arguments`. Raises `ConfigError`."""
    tree = {"serving": _defaults("serving/borrow") | _defaults("lending/default")}
    for key, value in parse(arguments).items():
        if key.startswith("serving."):
            _set(tree, key, value, "conf/serving and conf/lending")
    try:
        serving = msgspec.convert(tree, ServingSide).serving
    except msgspec.ValidationError as error:
        raise ConfigError(errors.explain(str(error), tree, ServingSide)) from None
    check(serving)
    return serving


def _defaults(name: str) -> dict[str, Any]:
    return yaml.safe_load((places.CONF / f"{name}.yaml").read_text(encoding="utf-8"))


def online_folder(online: Online) -> Online:
    """Replace a hub id in `online.model` by its snapshot's folder. The model is still served under
    the id, unless `served_name` is set. Raises `ConfigError`."""
    if online.model is None or online.model.startswith(("/", ".", "~")):
        return online
    folder = start.local_folder(online.model, "serving.online.model")
    if folder == Path(online.model):
        return online
    name = online.served_name or online.model
    return msgspec.structs.replace(online, model=str(folder), served_name=name)


def _set(tree: dict[str, Any], key: str, value: Any, where: str) -> None:
    """Set a key that the tree already has, in place. Raises `ConfigError` for an unknown key.
    Sections in OPEN and MAY_BE_NULL accept any key here. Converting the tree later rejects wrong
    keys in sections of MAY_BE_NULL."""
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
        near = difflib.get_close_matches(key, errors.keys(Config), n=1, cutoff=0.75)
        raise ConfigError(
            f"{key}: no such key in {where}" + (f"; did you mean {near[0]}?" if near else "")
        )
    branch[last] = value
