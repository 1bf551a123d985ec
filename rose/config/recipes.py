"""Options of the scripts that make a model, with their bounds: the values of `model.recipe`.

They are repeated here because the scripts import torch. tests/scripts/test_make_tiny_model.py
compares names and defaults. rose/models.py runs the scripts.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from rose.config import errors
from rose.config.common import Fraction, Section
from rose.config.errors import ConfigError
from rose.config.model import ModelShape

# Most parameters and demonstrations of a recipe: its warm start must end within 15 minutes. The
# default recipe has 0.1 million parameters and 1,920 demonstrations, and takes about 10 s.
MOST_PARAMETERS = 10**8
MOST_SHOWN = 500_000
VOCABULARY = 512  # tokens


class Tiny(Section):
    """The options of scripts/make_tiny_model.py. A head has 32 of the `hidden` channels; two heads
    share a key-value head. Each token is routed to two of `experts`."""

    seed: int = 1
    env: Literal["frozen_lake", "terminal"] = "frozen_lake"
    size: Annotated[int, Meta(ge=2, le=16)] = 4
    hole_probability: Annotated[float, Meta(ge=0, le=0.5)] = 0.2
    noise: Fraction = 0.6
    hidden: Annotated[int, Meta(ge=64, multiple_of=64)] = 64
    layers: Annotated[int, Meta(ge=1, le=256)] = 2
    experts: Annotated[int, Meta(ge=0, le=256)] = 0
    steps: Annotated[int, Meta(ge=1)] = 240
    batch: Annotated[int, Meta(ge=1)] = 8
    lr: Annotated[float, Meta(gt=0, le=1)] = 3e-3
    threads: Annotated[int, Meta(ge=1, le=256)] = 1

    @property
    def parameters(self) -> int:
        return ModelShape(
            layers=self.layers,
            hidden=self.hidden,
            intermediate=2 * self.hidden,
            heads=self.hidden // 32,
            kv_heads=self.hidden // 64,
            head_dim=32,
            vocab=VOCABULARY,
            tied_embeddings=True,
            experts=self.experts,
            expert_intermediate=self.hidden,
        ).parameters


class SmolLM2(Section):
    """The options of scripts/make_smollm2.py."""

    dtype: Literal["float32", "bfloat16"] = "float32"


OPTIONS: dict[str, type[Section]] = {"tiny": Tiny, "smollm2": SmolLM2}


def check(source: str, recipe: dict[str, Any]) -> None:
    """Raise `ConfigError` for an argument that the recipe `source` doesn't have, or a value with
    which it can't make a model."""
    kind = OPTIONS[source]
    known = [field.name for field in msgspec.structs.fields(kind)]
    given = {key.replace("-", "_"): value for key, value in recipe.items()}
    errors.check_known(given, known, "model.recipe", f"model.source={source}")
    try:
        made = msgspec.convert(given, kind)
    except msgspec.ValidationError as error:
        explained = errors.explain(str(error), given, kind)
        raise ConfigError(f"model.recipe.{explained}") from None
    if isinstance(made, Tiny):
        _check_tiny(made)


def _check_tiny(made: Tiny) -> None:
    """Raise `ConfigError` for a model that is too large, or whose warm start takes too long."""
    if made.experts == 1:
        raise ConfigError("model.recipe.experts=1: each token takes two of them: 0, or 2 and more")
    if made.parameters > MOST_PARAMETERS:
        raise ConfigError(
            f"model.recipe.hidden={made.hidden}: with layers={made.layers} and "
            f"experts={made.experts} the model has {made.parameters:,} parameters, of which a "
            f"recipe makes {MOST_PARAMETERS:,} at most; lower them, or give model.source=folder"
        )
    if (shown := made.steps * made.batch) > MOST_SHOWN:
        raise ConfigError(
            f"model.recipe.steps={made.steps}: with batch={made.batch} the warm start has "
            f"{shown:,} demonstrations, of which a recipe makes {MOST_SHOWN:,} at most; lower them"
        )
