"""Find the policy, in a run's folder or an exported model, and the held-out task to play.

Left out: the weights themselves, which `rose.parts.play.policy` loads.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from rose import config as configuration
from rose import models
from rose.config import Config, ConfigError, Env
from rose.coordinator import control
from rose.trainer import checkpoint
from rose.transfer import versions

# Tokens of the longest context of an exported model, unless the user sets model.max_context. vLLM
# reserves memory for one whole context.
LONGEST_CONTEXT = 8192
ENVIRONMENT = ("env=", "+experiment=", "env.name=")  # beginnings of overrides for the environment


@dataclass(frozen=True)
class Source:
    """A policy's folder, `place`. Of a run, `model` is the folder with its first weights. Of an
    exported model, `model` is `place` itself."""

    place: Path
    config: Config
    is_run: bool

    @property
    def model(self) -> Path:
        """The model's folder. Raises `ConfigError` if it is gone."""
        return models.resolve(self.config.model)

    def saved(self) -> dict[int, Path]:
        """Return version -> store or checkpoint, for each version that is available now.

        If a version is in both, return its store, which an engine reads without a copy.
        """
        found = {checkpoint.step_of(each): each for each in checkpoint.complete(self.place)}
        for store in sorted((self.place / "weights").glob("attempt-*")):
            found |= dict.fromkeys(versions.readable(store), store)
        return found


@dataclass(frozen=True)
class Task:
    """A held-out task. `number` counts as the run's evaluations do; `key` is the environment's
    section in the configuration."""

    number: int
    domain: str
    key: str
    env: Env
    seed: int


def find(place: Path, overrides: list[str]) -> Source:
    """Return the source in `place`, the folder of a run, or of an exported model if `overrides`
    name an environment. Raises `ConfigError` for any other folder."""
    if not place.is_dir():
        raise ConfigError(f"{place}: no such folder{_runs_beside(place)}")
    if not (place / "config.json").is_file():
        if (place / "adapter_config.json").is_file():
            models.check_folder(place)
        raise ConfigError(
            f"{place}: neither a run nor an exported model (no config.json); give a run's folder, "
            f"as outputs/NAME, or what rose export wrote{_runs_beside(place / 'any')}"
        )
    tree = configuration.stored(place / "config.json")
    if "model_type" in tree:
        return Source(place, _of_export(place, tree, overrides), is_run=False)
    if overrides:
        raise ConfigError(
            f"{overrides[0]}: {place} is a run, which plays its own environments; overrides are "
            f"for an exported model (rose export {shlex.quote(str(place))} --out DIR)"
        )
    return Source(place, configuration.load(place / "config.json", checked=False), is_run=True)


def _runs_beside(place: Path) -> str:
    """Return a text that names runs beside `place`; "" if there are none."""
    found = sorted(path.parent for path in place.parent.glob("*/config.json"))
    return f"; there are {', '.join(map(str, found[:8]))}" if found else ""


def _of_export(place: Path, tree: dict[str, Any], overrides: list[str]) -> Config:
    """Compose conf/ with `overrides` for the model in `place`. Raises `ConfigError`."""
    models.check_folder(place)
    if not any(each.startswith(ENVIRONMENT) for each in overrides):
        raise ConfigError(
            f"{place}: an exported model doesn't say what to play; name an environment, as "
            f"rose play {shlex.quote(str(place))} env=frozen_lake, or the experiment, as "
            "+experiment=terminal"
        )
    from rose import front  # takes a second, which a run's folder doesn't need
    from rose.launch import errors
    from rose.places import CONF

    context = int(min(tree.get("max_position_embeddings") or LONGEST_CONTEXT, LONGEST_CONTEXT))
    dtype = tree.get("dtype") or tree.get("torch_dtype") or "bfloat16"
    own = [f"model.max_context={context}", f"model.dtype={dtype}"]
    whole = [*own, "model.source=folder", *overrides]
    try:
        (composed,) = front.compose(CONF, whole)
    except errors.COMPLAINTS as error:
        raise ConfigError(errors.explain(error, CONF, whole)) from None
    composed["model"]["path"] = str(place.resolve())  # no override, which Hydra could misread
    return configuration.from_dict(composed, checked=False)


def with_temperature(config: Config, temperature: float) -> Config:
    """Return `config` whose evaluations all sample at `temperature`."""
    replace = msgspec.structs.replace
    sets = {name: replace(one, temperature=None) for name, one in config.eval.sets.items()}
    return replace(config, eval=replace(config.eval, temperature=temperature, sets=sets))


def held_out(config: Config, number: int, domain: str | None) -> Task:
    """Return held-out task `number`, of the run's mixture or of the environment `domain`.

    Raises `ConfigError` for an environment that the run doesn't have.
    """
    there = config.environments
    if domain is not None and domain not in there:
        raise ConfigError(f"--env {domain}: no such environment; there are {', '.join(there)}")
    weights = config.env.weights if domain is None else {domain: 1.0}
    found = control.eval_task(config.eval.seed, number, weights)
    key, env = there[found.domain]
    return Task(number, found.domain, key, env, found.seed)
