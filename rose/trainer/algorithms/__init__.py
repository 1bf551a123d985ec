"""RL algorithms, one file each (`base.Algorithm` is the interface), and `build`, which makes one by
its name. A part adds its own in a module `algorithms.py` with ALGORITHMS (`rose.extensions`).

The package may import `rose.config`, and knows nothing of ranks, engines or DeepSpeed. It does not
import torch, which takes seconds, since each `launch.py` loads it to check the algorithm's
arguments. docs/algorithms.md says how to add an algorithm, here or in another package.
"""

from __future__ import annotations

from dataclasses import MISSING, fields, is_dataclass
from typing import Any

import msgspec

from rose import extensions
from rose.config import ConfigError, errors, outside
from rose.trainer.algorithms.base import Algorithm
from rose.trainer.algorithms.grpo import Grpo


def algorithms() -> dict[str, type]:
    """Return ROSE's own algorithms by name: this package's and those of the parts."""
    return {"grpo": Grpo} | extensions.merged("algorithms", "ALGORITHMS")


def build(name: str, args: dict[str, Any]) -> Algorithm:
    """Make the algorithm of `algorithm.name` with `algorithm.args`. Raises `ConfigError` for an
    unknown name, an unknown or missing argument, or an impossible value."""
    own = algorithms()
    algorithm = own.get(name) or _outside(name, tuple(own))
    known = {field.name: field for field in fields(algorithm) if field.init}
    errors.check_known(args, known, "algorithm.args", name)
    for key, field in known.items():
        if key not in args and field.default is MISSING and field.default_factory is MISSING:
            raise ConfigError(
                f"algorithm.args.{key}: missing; conf/algorithm/{name}.yaml has its default"
                if name in own
                else f"algorithm.args.{key}: missing; {name} needs it"
            )
    try:
        made = msgspec.convert(args, algorithm)
    except msgspec.ValidationError as error:
        raise ConfigError(_explain(str(error), args)) from None
    except (Exception, SystemExit) as error:  # The class is a user's.
        raise ConfigError(f"algorithm.args={args}: {name} raised {error!r}") from error
    if lacks := outside.lacking(made, Algorithm):
        raise ConfigError(
            f"algorithm.name={name!r}: {algorithm.__qualname__} is no algorithm, it lacks "
            f"{', '.join(lacks)} (rose/trainer/algorithms/base.py)"
        )
    return made


def _outside(name: str, own: tuple[str, ...]) -> type:
    """Find a dataclass of another package by an entry point, or by package.module:Class."""
    found = outside.find("algorithm.name", name, "algorithm", own, "rose.algorithms")
    if not is_dataclass(found):
        raise ConfigError(
            f"algorithm.name={name!r}: {found.__qualname__} must be a dataclass, whose fields are "
            "algorithm.args"
        )
    return found


def _explain(message: str, args: dict[str, Any]) -> str:
    """Rewrite msgspec's 'Expected `float` >= 0.0 - at `$.clip_low`' with the full key and its
    value. An error of a `__post_init__` names the keys itself, and is returned as it is."""
    text, found, key = message.partition(" - at `$.")
    key = key.rstrip("`")
    return f"algorithm.args.{key}={args[key]!r}: {text[0].lower()}{text[1:]}" if found else message
