"""The tasks that agents learn on, one file each, behind the protocol in `base`.

An environment's name is its file's: ``env.name=frozen_lake`` is class ``FrozenLake`` in
``rose/agent/envs/frozen_lake.py``, imported only when a run asks for it. Others' are entry points
of the group `rose.environments`, or named package.module:Class. May import `rose.config`; must know
nothing of models, tokens, MPI or how it is run. Files with a leading underscore are shared helpers.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import pkgutil
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import msgspec

from rose import config, inputs
from rose.agent.envs.agent import Agent
from rose.agent.envs.base import Environment
from rose.config import ConfigError, outside
from rose.reward import values

# What an environment needs that ROSE itself does without; pyproject.toml has the same as extras.
PACKAGES = {
    "reasoning_gym": "reasoning-gym>=0.1.25",
    "textarena": "textarena>=0.7.4",
    "math_verify": "math-verify[antlr4-9-3]>=0.9",
    "mcp": "mcp>=2.0",
    "pyarrow": "pyarrow",
    "datasets": "datasets",
}
# What an environment may say of itself, and what it may have besides.
FLAGS = ("requires_tool", "several_calls", "rewards_turns")
METHODS = ("reset", "step", "close")
OPTIONAL = ("end", "checkpoint", "resume", "starts")


def missing(key: str, error: ModuleNotFoundError) -> ConfigError:
    """`key` needs a package that is not installed: its name, and how it is."""
    package = (error.name or "").partition(".")[0]
    return ConfigError(
        f"{key}: needs the Python package {package!r}, which is not installed; "
        f"{sys.executable} -m pip install '{PACKAGES.get(package, package)}'"
    )


def names() -> list[str]:
    """Every environment there is, by looking at the files."""
    return sorted(
        m.name
        for m in pkgutil.iter_modules(__path__)
        if m.name != "base" and not m.name.startswith("_")
    )


def build(env: config.Env) -> Environment:
    """A fresh environment of this configuration; one serves one episode.

    Raises `ConfigError` naming env.name or env.args.<key>, and what is known.
    """
    cls = _find(env.name)
    known = inspect.signature(cls).parameters
    free = any(p.kind is p.VAR_KEYWORD for p in known.values())
    for key, value in env.args.items():
        if key not in known and not free:
            raise ConfigError(
                f"env.args.{key}={value!r}: {env.name} takes no such argument; "
                f"it knows {', '.join(known) or 'none'}"
            )
    for key, parameter in known.items():
        wanted = parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
        if wanted and parameter.default is parameter.empty and key not in env.args:
            raise ConfigError(f"env.args.{key}: missing; {env.name} needs it")
    try:
        made = cls(**env.args)
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:  # The class is a user's.
        raise ConfigError(f"env.args={env.args}: {env.name} raised {error!r}") from error
    # programs of their own (env=agent) are run by the gateway, and take no steps
    if not isinstance(made, Agent) and (wrong := _wrong(made)):
        raise ConfigError(
            f"env.name={env.name!r}: {cls.__module__}.{cls.__qualname__} is no environment, "
            f"{wrong} (rose/agent/envs/base.py)"
        )
    return made


def _wrong(made: Environment) -> str:
    """Return what is wrong with an environment's attributes; "" if nothing. A method in the place
    of a flag would be true in every condition."""
    try:
        if lacks := outside.lacking(made, Environment):
            return f"it lacks {', '.join(lacks)}"
        found = {name: getattr(made, name, None) for name in (*FLAGS, *METHODS, *OPTIONAL)}
    except Exception as error:  # Each of these may be a property.
        return f"one of its properties raised {error!r}"
    for name, given in found.items():
        if given is None and name not in METHODS:
            continue
        try:
            if name in FLAGS:
                values.flag(given)
            elif not callable(given):
                return f"its {name} is {values.shown(given)}, not a method"
        except ValueError:
            return f"its {name} is {values.shown(given)}, not true or false"
    return ""


def check(
    env: config.Env | config.Mixture, sets: Mapping[str, config.EvalSet] = MappingProxyType({})
) -> str:
    """Raises `ConfigError` unless `build` would succeed for every member and every one of `sets`
    (of eval.sets), and what it has as `preflight`, given its step_timeout_s; nothing that this
    starts is left. Returns what these say of this machine, for the run's report."""
    said: dict[str, None] = {}
    found = {env.key_of(name): member for name, member in env.members.items()}
    found |= {f"eval.sets.{name}": one for name, one in sets.items()}
    for key, member in found.items():
        try:
            made = build(member)
            preflight = getattr(made, "preflight", None)
            if preflight and (words := preflight(member.step_timeout_s)):
                said[words] = None
        except ConfigError as error:
            if member is env:
                raise
            # an environment doesn't know that it is one of several
            raise ConfigError(f"{key}.{str(error).removeprefix('env.')}") from error.__cause__
    return "; ".join(said)


def doubts(env: config.Env | config.Mixture, evaluated: bool = True) -> tuple[str, ...]:
    """Return what members say of themselves that a user should know before the run. A `doubt` is
    about held-out tasks, and so about a run that is `evaluated`; a `training_doubt` isn't."""
    kinds = ("doubt", "training_doubt")[not evaluated :]
    said = (
        (env.key_of(name), getattr(build(member), kind, ""))
        for name, member in env.members.items()
        for kind in kinds
    )
    return tuple(f"{key}.{words.removeprefix('env.')}" for key, words in said if words)


def rewards_turns(env: config.Env) -> bool:
    """Whether its steps' rewards say what turns are worth (`base.Environment`). Raises as
    `build`."""
    return bool(getattr(build(env), "rewards_turns", False))


def is_program(env: config.Env) -> bool:
    """Whether an agent of its own acts in it, behind the gateway. Raises as `build`."""
    return isinstance(build(env), Agent)


def with_whole_paths(env: config.Env | config.Mixture) -> config.Env | config.Mixture:
    """With the arguments that a class calls its `paths` from the root: ranks may start in another
    folder. What follows a path (FILE:FUNCTION, FOLDER#SPLIT) stays. Call it after `check`."""
    if isinstance(env, config.Mixture):
        members = {name: with_whole_paths(member) for name, member in env.members.items()}
        return msgspec.structs.replace(env, members=members)
    args, cls = dict(env.args), _find(env.name)
    defaults = inspect.signature(cls).parameters
    for key in getattr(cls, "paths", ()):
        place, mark, rest = re.match(r"([^#:]*)([#:]?)(.*)", str(args.get(key)), re.S).groups()
        keyword = args.get(key) == defaults[key].default  # math, random: whatever lies here
        # A file's name may have such a mark in it.
        if isinstance(args.get(key), str) and Path(args[key]).exists():
            place, mark, rest = args[key], "", ""
        # package:function is no folder's
        there = Path(place).is_file() if mark == ":" else Path(place).exists()
        if isinstance(args.get(key), str) and not keyword and there:
            # without following links: a virtual environment's python is one
            args[key] = f"{Path(place).absolute()}{mark}{rest}"
    return msgspec.structs.replace(env, args=args)


@functools.cache  # A process has what it imported, whatever becomes of the file.
def _verify(cls: type) -> None:
    """Raise `ConfigError` if the file of a user's class was edited before this process read it."""
    inputs.verify(f"{cls.__module__}:{cls.__name__}")


def _find(name: str) -> type:
    if name not in (ours := names()):
        cls = outside.find("env.name", name, "environment", tuple(ours), "rose.environments")
        _verify(cls)
        return cls
    try:
        module = importlib.import_module(f"{__name__}.{name}")
    except ModuleNotFoundError as error:
        raise missing(f"env.name={name!r}", error) from error
    cls = name.title().replace("_", "")
    try:
        return getattr(module, cls)
    except AttributeError:
        raise ConfigError(
            f"env.name={name!r}: {module.__file__} must define the class {cls}"
        ) from None
