"""What planning needs to know of the model, before and after it is made.

Left out: making it and where it lies (rose/models.py), and loading it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec

from rose import config as configuration
from rose import hub, models
from rose.config import Config, ConfigError, ModelShape, read_shape
from rose.trainer import compilers

# kinds of rotary positions to whose max_position_embeddings vLLM applies no factor
SCALED = ("default", "su", "longrope", "llama3", "yarn", "deepseek_yarn", "deepseek_llama_scaling")


def shape(c: Config) -> ModelShape | None:
    """The model's shape: from its folder, else model.shape; None if only making the model will
    tell. Makes and loads nothing. Raises `ConfigError` when the folder should be there and isn't (a
    dry run with model.shape does without it)."""
    if c.model.source == "hub":
        if folder := _in_cache(c):
            hub.check_trainable(folder, f"model.path={c.model.path!r}")
            return _shape_of(folder, c)
        if c.model.shape is None and not c.cluster.dry_run:
            folder = hub.configuration(models.hub_id(c.model), c.model.revision)
            hub.check_trainable(folder, f"model.path={c.model.path!r}")
            return _shape_of(folder, c)
        if c.model.shape is None:
            raise ConfigError(
                f"model.shape=None: {c.model.path} is not in the cache yet, so planning needs its "
                f"shape: copy it from its config.json, or run `hf download {c.model.path}` first"
            )
        return c.model.shape
    if c.cluster.dry_run and c.model.shape is not None:
        return c.model.shape
    if c.model.path is not None:
        folder = models.check_folder(Path(c.model.path).expanduser())
        named = f"model.path={c.model.path!r}"
        hub.check_weights(folder, named)
        hub.check_files(folder, named, "copy the folder again")
        return _shape_of(folder, c)
    folder = models.recipe_folder(c.model.source, c.model.recipe)
    return read_shape(models.check_folder(folder)) if folder.exists() else c.model.shape


def known(c: Config) -> Config:
    """With the model's shape if that can be told without making it. Raises `ConfigError` as `shape`
    does."""
    found = c.model.shape or shape(c)
    return msgspec.structs.replace(c, model=msgspec.structs.replace(c.model, shape=found))


def _in_cache(c: Config) -> Path | None:
    """The folder with the model's config.json, if it needs no download."""
    models.hub_id(c.model)
    if c.model.snapshot is not None:
        folder = models.resolve(c.model)
    else:
        folder = hub.cached(c.model.path, c.model.revision)
    return folder if folder is not None and (folder / "config.json").is_file() else None


def fetch(c: Config, stored: Path) -> Config:
    """A hub's model is found or downloaded now, once, on the machine that has the network; any
    other model is left as it is. A run that continues (`stored`, its config.json, is there) takes
    the commit that it began with.

    Raises `ConfigError` when the hub can't give it, or it can't be trained.
    """
    if c.model.source != "hub":
        return c
    commit = _commit_of(stored, c)
    folder = hub.snapshot(models.hub_id(c.model), commit or c.model.revision)
    hub.check_trainable(folder, f"model.path={c.model.path!r}")
    found = msgspec.structs.replace(c.model, snapshot=str(folder), shape=_shape_of(folder, c))
    return msgspec.structs.replace(c, model=found)


def _commit_of(stored: Path, c: Config) -> str | None:
    """The commit that the run of this name trains, unless it starts over."""
    if c.fresh or not stored.exists():
        return None
    before = configuration.load(stored, checked=False).model
    return Path(before.snapshot).name if before.snapshot and before.path == c.model.path else None


def prepare(c: Config) -> Config:
    """Make the model if a recipe has to; the configuration with its absolute path and its shape.
    Raises `ConfigError` when the recipe fails, or where a hub's snapshot can't be seen."""
    folder = models.resolve(c.model)
    if c.model.source == "hub":
        found = msgspec.structs.replace(c.model, snapshot=str(folder), shape=_shape_of(folder, c))
        return msgspec.structs.replace(c, model=found)
    folder = folder.resolve()
    made = msgspec.structs.replace(c.model, path=str(folder), shape=_shape_of(folder, c))
    return msgspec.structs.replace(c, model=made)


def _shape_of(folder: Path, c: Config) -> ModelShape:
    """Raises `ConfigError` for a context longer than the model's, which vLLM would refuse later,
    and where ranks can't share its rows or its operations can't be fused as asked."""
    shape, raw = (
        read_shape(folder),
        json.loads((folder / "config.json").read_text(encoding="utf-8")),
    )
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    positions = raw.get("max_position_embeddings") or c.model.max_context
    # as vLLM 0.32 does: these kinds have max_position_embeddings scaled already
    factor = 1.0 if kind in SCALED else rope.get("factor") or 1.0
    if c.model.max_context > positions * factor:
        raise ConfigError(
            f"model.max_context={c.model.max_context}: model {c.model.name} has "
            f"{positions * factor:g} positions (max_position_embeddings={positions} in its "
            f"config.json, rotary positions of the kind {kind}); lower it, give a model for longer "
            "contexts, or write the scaled number there"
        )
    compilers.check_type(c.trainer, raw.get("model_type", "unknown"))
    parts, found = c.trainer.sequence_parallel, _unshareable(raw, kind)
    if parts > 1 and found:
        raise ConfigError(
            f"trainer.sequence_parallel={parts}: model {c.model.name} has {found}, whose rows "
            "ranks can't share; set it to 1"
        )
    return shape


def _unshareable(raw: dict[str, Any], rope: str) -> str:
    """What in a config.json forbids it, "" if nothing does: DeepSpeed's Ulysses attends to the
    whole context, and angles that depend on a row's length would be those of a part's."""
    partly = set(raw.get("layer_types") or ()) - {"full_attention"}
    if partly:
        return f"layers of the kind {', '.join(sorted(partly))}"
    if raw.get("sliding_window") and raw.get("use_sliding_window", True):
        return f"sliding_window={raw['sliding_window']}"
    return f"rotary positions of the kind {rope}" if rope in ("dynamic", "longrope") else ""
