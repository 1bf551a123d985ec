"""Find the model's shape and files, which planning needs, before and after the model is made.

Left out: making the model, the choice of its folder (rose/models.py), and loading it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec

from rose import config as configuration
from rose import hub, models, weight_files
from rose.config import Config, ConfigError, ModelShape, read_shape
from rose.trainer import compilers

# Kinds of rotary positions for which vLLM doesn't multiply max_position_embeddings by a factor.
SCALED = ("default", "su", "longrope", "llama3", "yarn", "deepseek_yarn", "deepseek_llama_scaling")


def shape(c: Config) -> ModelShape | None:
    """Return the model's shape from its folder, or else model.shape; None if it is unknown until
    the model is made. Makes no model and loads no weights. Raises `ConfigError` if the folder is
    missing and needed (a dry run with model.shape needs none)."""
    if c.model.source == "hub":
        folder = _in_cache(c)
        if folder is None and c.model.shape is None and not c.cluster.dry_run:
            folder = hub.configuration(models.hub_id(c.model), c.model.revision)
        if folder is not None:
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
        weight_files.check_trainable(folder, named, "copy the folder again")
        return _shape_of(folder, c)
    folder = models.recipe_folder(c.model.source, c.model.recipe)
    return read_shape(models.check_folder(folder)) if folder.exists() else c.model.shape


def known(c: Config) -> Config:
    """Return the configuration with the model's shape filled in, if it is known before the model is
    made. Raises `ConfigError` as `shape` does."""
    found = c.model.shape or shape(c)
    return msgspec.structs.replace(c, model=msgspec.structs.replace(c.model, shape=found))


def _in_cache(c: Config) -> Path | None:
    """Return the folder with the model's config.json if it needs no download, else None."""
    models.hub_id(c.model)
    if c.model.snapshot is not None:
        folder = models.resolve(c.model)
    else:
        folder = hub.cached(c.model.path, c.model.revision)
    return folder if folder is not None and (folder / "config.json").is_file() else None


def fetch(c: Config, stored: Path) -> Config:
    """Find or download a hub's model and return the configuration with its folder and shape. Call
    this once, where there is a network. Any other model is left as it is. A run that continues (its
    config.json, `stored`, exists) keeps the commit with which it began. Raises `ConfigError` if the
    hub can't provide the model, or if it can't be trained."""
    if c.model.source != "hub":
        return c
    commit = _commit_of(stored, c)
    folder = hub.snapshot(models.hub_id(c.model), commit or c.model.revision)
    named = f"model.path={c.model.path!r}"
    hub.check_trainable(folder, named)
    weight_files.check_trainable(folder, named, "give another revision, or another model")
    found = msgspec.structs.replace(c.model, snapshot=str(folder), shape=_shape_of(folder, c))
    return msgspec.structs.replace(c, model=found)


def _commit_of(stored: Path, c: Config) -> str | None:
    """Return the hub's commit with which the run of this name began; None if the run is new, starts
    over or has another model now. `stored` is the run's config.json."""
    if c.fresh or not stored.exists():
        return None
    before = configuration.load(stored, checked=False).model
    return Path(before.snapshot).name if before.snapshot and before.path == c.model.path else None


def prepare(c: Config) -> Config:
    """Make the model if it has a recipe. Return the configuration with the model's absolute path
    and shape. Raises `ConfigError` if the recipe fails or a hub's snapshot isn't visible here."""
    folder = models.resolve(c.model)
    if c.model.source == "hub":
        found = msgspec.structs.replace(c.model, snapshot=str(folder), shape=_shape_of(folder, c))
        return msgspec.structs.replace(c, model=found)
    folder = folder.resolve()
    made = msgspec.structs.replace(c.model, path=str(folder), shape=_shape_of(folder, c))
    return msgspec.structs.replace(c, model=made)


def _shape_of(folder: Path, c: Config) -> ModelShape:
    """Return the model's shape. Raises `ConfigError` if
    1. model.max_context is longer than the model's context, which vLLM would refuse later;
    2. trainer.compile or trainer.kernels don't support the model's type;
    3. trainer.sequence_parallel can't split its rows."""
    shape = read_shape(folder)
    raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    positions = raw.get("max_position_embeddings") or c.model.max_context
    # As in vLLM 0.32: max_position_embeddings of these kinds includes the factor already.
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
    """Return the property in `raw`, a config.json, that keeps ranks from sharing rows; "" if none.
    DeepSpeed's Ulysses attends to the whole context. Rotary angles that depend on a row's length
    would be computed from the length of a part."""
    partly = set(raw.get("layer_types") or ()) - {"full_attention"}
    if partly:
        return f"layers of the kind {', '.join(sorted(partly))}"
    if raw.get("sliding_window") and raw.get("use_sliding_window", True):
        return f"sliding_window={raw['sliding_window']}"
    return f"rotary positions of the kind {rope}" if rope in ("dynamic", "longrope") else ""
