"""Where the model is: checks its folder, or makes it once with its recipe in the user's cache.

A recipe is `scripts/make_<source>_model.py --out DIR --key value ...` with model.recipe as the options. Left
out: loading; engine and trainer load whatever folder stands in model.path, whoever made it.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import msgspec

from rose.config import Config, ConfigError, ModelShape, read_shape

REPOSITORY = Path(__file__).resolve().parents[2]
RECIPES = ("tiny", "smollm2")
RECIPE_TIMEOUT_S = 1800.0


def folder(c: Config) -> Path | None:
    """The model's folder on this machine, made or not; None when model.source=hub names it for transformers."""
    if c.model.source == "hub":
        return None
    if c.model.source in RECIPES and c.model.path is None:
        recipe = json.dumps(c.model.recipe, sort_keys=True)
        digest = hashlib.sha256((recipe + _script(c).read_text()).encode()).hexdigest()[:10]
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        return cache / "rose" / "models" / f"{c.model.source}-{digest}"
    return Path(c.model.path).resolve()


def shape(c: Config) -> ModelShape | None:
    """The model's shape: from its folder, else model.shape; None if it is only known once the model is made.
    Raises `ConfigError` when the folder should be there and isn't."""
    where = folder(c)
    if where is not None and where.exists():
        return read_shape(where)
    if c.model.source == "folder" and not c.cluster.dry_run:
        read_shape(where)  # says what is missing
    if c.model.source == "hub" and c.model.shape is None:
        raise ConfigError(f"model.shape=None: model.source=hub needs it to plan; copy it from the config.json of "
                          f"{c.model.path}")
    return c.model.shape


def prepare(c: Config, log: Path) -> Config:
    """Make the model if it isn't there (its maker's words go to `log`); the configuration with path and shape."""
    where = folder(c)
    if where is None:
        return c
    if not where.exists():
        if c.model.source not in RECIPES:
            read_shape(where)
        _make(c, where, log)
    model = msgspec.structs.replace(c.model, path=str(where), shape=read_shape(where))
    return msgspec.structs.replace(c, model=model)


def recipe_command(c: Config, out: Path) -> list[str]:
    options = [text for key, value in c.model.recipe.items() for text in ("--" + key.replace("_", "-"), str(value))]
    return [sys.executable, str(_script(c)), "--out", str(out), *options]


def _script(c: Config) -> Path:
    return REPOSITORY / "scripts" / f"make_{c.model.source}_model.py"


def _make(c: Config, where: Path, log: Path) -> None:
    """Into a folder of its own first: two launches that make the same model don't meet, and the second's result,
    which is identical, is dropped."""
    where.parent.mkdir(parents=True, exist_ok=True)
    part = where.with_name(f".{where.name}.{os.getpid()}")
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))}
    with open(log, "w") as words:
        done = subprocess.run(recipe_command(c, part), stdout=words, stderr=subprocess.STDOUT, env=env,
                              stdin=subprocess.DEVNULL, timeout=RECIPE_TIMEOUT_S)
    if done.returncode:
        last = "\n".join(log.read_text(errors="replace").splitlines()[-5:])
        raise ConfigError(f"model.source={c.model.source!r}: its recipe failed (model.recipe={c.model.recipe}); the "
                          f"last lines of {log}:\n{last}")
    if not where.exists():
        part.rename(where)
