"""What planning needs to know of the model, before and after it is made.

Left out: making it and where it lies (rose/models.py), and loading it.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from rose import models
from rose.config import Config, ConfigError, ModelShape, read_shape


def shape(c: Config) -> ModelShape | None:
    """The model's shape: from its folder, else model.shape; None if only making the model will tell. Makes and
    loads nothing. Raises `ConfigError` when the folder should be there and isn't (a dry run with model.shape does
    without it), and for a recipe's unknown option."""
    if c.model.source == "hub":
        models.resolve(c.model)
        if c.model.shape is None:
            raise ConfigError(f"model.shape=None: model.source=hub needs it to plan; copy it from the config.json "
                              f"of {c.model.path}")
        return c.model.shape
    if c.model.source in models.RECIPES:
        models.check_recipe(c.model.source, c.model.recipe)
    if c.cluster.dry_run and c.model.shape is not None:
        return c.model.shape
    if c.model.path is not None:
        return read_shape(models.check_folder(Path(c.model.path).expanduser()))
    folder = models.recipe_folder(c.model.source, c.model.recipe)
    return read_shape(models.check_folder(folder)) if folder.exists() else c.model.shape


def known(c: Config) -> Config:
    """With the model's shape if that can be told without making it. Raises `ConfigError` as `shape` does."""
    found = c.model.shape or shape(c)
    return msgspec.structs.replace(c, model=msgspec.structs.replace(c.model, shape=found))


def prepare(c: Config) -> Config:
    """Make the model if a recipe has to; the configuration with its absolute path and its shape. Raises
    `ConfigError` when the recipe fails."""
    if c.model.source == "hub":
        return c
    folder = models.resolve(c.model).resolve()
    made = msgspec.structs.replace(c.model, path=str(folder), shape=read_shape(folder))
    return msgspec.structs.replace(c, model=made)
