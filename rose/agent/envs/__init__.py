"""The environments, one file each, behind the protocol in `base`.

An environment has the name of its file: ``env.name=frozen_lake`` is class ``FrozenLake`` in
``rose/agent/envs/frozen_lake.py``, imported only when a run uses it. Optional parts of ROSE
(`rose.extensions`) have a folder `envs` too. Other packages' environments are entry points of the
group `rose.environments`, or named package.module:Class. An environment may import `rose.config`,
and must know nothing of models, tokens, MPI or how it is run. Files with a leading underscore are
shared helpers.
"""

from __future__ import annotations

import functools
import importlib
import math
import pkgutil
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, get_type_hints

import msgspec

from rose import config, extensions, inputs
from rose.agent.envs.base import Environment, player_of
from rose.config import ConfigError, outside
from rose.reward import values

# Packages that only some environments need, as pip requirements. pyproject.toml has them as extras.
PACKAGES = {
    "reasoning_gym": "reasoning-gym>=0.1.25",
    "textarena": "textarena>=0.7.4",
    "math_verify": "math-verify[antlr4-9-3]>=0.9",
    "mcp": "mcp>=2.0",
    "pyarrow": "pyarrow",
    "datasets": "datasets",
}
# Flags, required methods and optional methods of an environment (base.py).
FLAGS = ("requires_tool", "several_calls", "rewards_turns")
METHODS = ("reset", "step", "close")
OPTIONAL = ("end", "checkpoint", "resume", "starts")
# msgspec's names of argument types, and how error messages call these types.
TYPES = {
    "BoolType": "true or false",
    "IntType": "an integer",
    "FloatType": "a number",
    "StrType": "a text",
    "ListType": "a list",
    "CollectionType": "a list",
    "DictType": "a map",
    "NoneType": "null",
}


def missing(key: str, error: ModuleNotFoundError) -> ConfigError:
    """Return an error that names `key` and how to install the missing package or part of ROSE."""
    name = error.name or ""
    if name.startswith("rose."):
        return ConfigError(f"{key}: {extensions.missing(name)}")
    package = name.partition(".")[0]
    return ConfigError(
        f"{key}: needs the Python package {package!r}, which is not installed; "
        f"{sys.executable} -m pip install '{PACKAGES.get(package, package)}'"
    )


@functools.cache
def _modules() -> dict[str, str]:
    """Return ROSE's own environments, name -> module, from this folder and the parts' `envs`."""
    packages = [sys.modules[__name__], *extensions.modules("envs").values()]
    return {
        found.name: f"{package.__name__}.{found.name}"
        for package in packages
        for found in pkgutil.iter_modules(package.__path__)
        if found.name != "base" and not found.name.startswith("_")
    }


def names() -> list[str]:
    """Return the names of ROSE's own environments."""
    return sorted(_modules())


def build(env: config.Env) -> Environment:
    """Return a new environment of this configuration, for one episode. Raises `ConfigError` that
    names env.name or env.args.<key>, and the known values."""
    cls = _class_of(env.name)
    shown = outside.parameters(cls)
    known = shown or {}
    free = shown is None or any(p.kind is p.VAR_KEYWORD for p in known.values())
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
    if cls.__module__.startswith("rose."):
        hints = get_type_hints(cls.__init__, include_extras=True)
        for key, value in env.args.items():
            _check(key, value, hints.get(key, Any))
    try:
        made = cls(**env.args)
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:  # any type, from a user's class
        raise ConfigError(f"env.args={env.args}: {env.name} raised {error!r}") from error
    # An agent with a program of its own (env=agent) has no `step`.
    if player_of(made) is None and (wrong := _wrong(made)):
        raise ConfigError(
            f"env.name={env.name!r}: {cls.__module__}.{cls.__qualname__} is no environment, "
            f"{wrong} (rose/agent/envs/base.py)"
        )
    return made


def _check(key: str, value: Any, hint: Any) -> None:
    """Raise `ConfigError` if an argument doesn't have the type of its hint."""
    try:
        msgspec.convert(value, hint)
        right = not isinstance(value, float) or math.isfinite(value)
    except msgspec.ValidationError:
        right = False
    if not right:
        wanted = _wanted(msgspec.inspect.type_info(hint))
        raise ConfigError(f"env.args.{key}={value!r}: {wanted}")


def _wanted(kind: msgspec.inspect.Type) -> str:
    """Return a type in words, such as "an integer from 1 to 12"."""
    if isinstance(kind, msgspec.inspect.UnionType):
        return ", or ".join(map(_wanted, kind.types))
    words = TYPES.get(type(kind).__name__, "another type")
    if isinstance(getattr(kind, "item_type", None), msgspec.inspect.StrType):
        words += " of texts"
    if isinstance(getattr(kind, "value_type", None), msgspec.inspect.StrType):
        words += " of texts, as {PORT: '8080'}"
    bounds = {"gt": "above", "ge": "from", "lt": "below", "le": "to"}
    found = {word: getattr(kind, name, None) for name, word in bounds.items()}
    limits = (f" {word} {limit:.10g}" for word, limit in found.items() if limit is not None)
    return words + "".join(limits)


def _wrong(made: Environment) -> str:
    """Return what is wrong with an environment's attributes; "" if nothing is. Flags are checked
    because a flag defined as a method would always count as true."""
    try:
        if lacks := outside.lacking(made, Environment):
            return f"it lacks {', '.join(lacks)}"
        found = {name: getattr(made, name, None) for name in (*FLAGS, *METHODS, *OPTIONAL)}
    except Exception as error:  # any type, since each attribute may be a property
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
    """Build the environments of all members and of `sets` (eval.sets). If an environment has
    `preflight`, call it with its step_timeout_s. Return these calls' texts about this machine, for
    the run's report. Nothing that this starts is left. Raises `ConfigError` if an environment can't
    be built or its preflight fails."""
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
            # An environment doesn't know that it is one of several, so the key is replaced here.
            raise ConfigError(f"{key}.{str(error).removeprefix('env.')}") from error.__cause__
    return "; ".join(said)


def doubts(env: config.Env | config.Mixture, evaluated: bool = True) -> tuple[str, ...]:
    """Return the members' warnings, which the user gets before the run. A `training_doubt` always
    counts. A `doubt` is about held-out tasks, so it counts only if the run is `evaluated`."""
    kinds = ("doubt", "training_doubt")[not evaluated :]
    said = (
        (env.key_of(name), getattr(build(member), kind, ""))
        for name, member in env.members.items()
        for kind in kinds
    )
    return tuple(f"{key}.{words.removeprefix('env.')}" for key, words in said if words)


def rewards_turns(env: config.Env) -> bool:
    """True if its rewards rank good turns above bad turns. Raises the errors of `build`."""
    return bool(getattr(build(env), "rewards_turns", False))


def is_program(env: config.Env) -> bool:
    """True if the agent is a program of its own, not ROSE's loop. Raises the errors of `build`."""
    return player_of(build(env)) is not None


def with_whole_paths(env: config.Env | config.Mixture) -> config.Env | config.Mixture:
    """Return `env` with absolute paths in the arguments that its class lists in `paths`, since
    ranks may start in another folder. A suffix of a path (FILE:FUNCTION, FOLDER#SPLIT) stays. Call
    `check` first, whose errors name the right key of a mixture's member."""
    if isinstance(env, config.Mixture):
        members = {name: with_whole_paths(member) for name, member in env.members.items()}
        return msgspec.structs.replace(env, members=members)
    args, cls = dict(env.args), _class_of(env.name)
    defaults = outside.parameters(cls) or {}
    for key in getattr(cls, "paths", ()):
        place, mark, rest = re.match(r"([^#:]*)([#:]?)(.*)", str(args.get(key)), re.S).groups()
        # A default is a keyword, such as math, even if a file is named so.
        keyword = key in defaults and args.get(key) == defaults[key].default
        # A file's name may itself contain # or a colon.
        if isinstance(args.get(key), str) and Path(args[key]).exists():
            place, mark, rest = args[key], "", ""
        # Before a colon only a file counts: in package:function, the package may be a folder here.
        there = Path(place).is_file() if mark == ":" else Path(place).exists()
        if isinstance(args.get(key), str) and not keyword and there:
            # resolve() would follow links, and the python of a virtual environment is a link.
            args[key] = f"{Path(place).absolute()}{mark}{rest}"
    return msgspec.structs.replace(env, args=args)


@functools.cache  # a single check per process, which never imports the class again
def _verify(cls: type) -> None:
    """Raise `ConfigError` if the file of a user's class was edited since the run's launch."""
    inputs.verify(f"{cls.__module__}:{cls.__name__}")


def _class_of(name: str) -> type:
    """Import the environment `name` and return its class. Raises `ConfigError`."""
    if name not in (ours := names()):
        cls = outside.find("env.name", name, "environment", tuple(ours), "rose.environments")
        _verify(cls)
        return cls
    try:
        module = importlib.import_module(_modules()[name])
    except ModuleNotFoundError as error:
        raise missing(f"env.name={name!r}", error) from error
    cls = name.title().replace("_", "")
    try:
        return getattr(module, cls)
    except AttributeError:
        raise ConfigError(
            f"env.name={name!r}: {module.__file__} must define the class {cls}"
        ) from None
