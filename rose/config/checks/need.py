"""What every check is written with."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

from rose.config import errors
from rose.config.errors import ConfigError

Need = Callable[[bool, str, str], None]  # (is it so?, key, what would be right)
NO_DRAFTS = (
    "vLLM 0.32 on CPUs samples wrong tokens with speculative decoding, without saying so "
    "(vllm-project/vllm issue 55005): leave it out, or run on GPUs; a run's own engines, where "
    "ROSE mends it, have rollout/draft=group or ngram"
)


def needs(tree: dict[str, Any]) -> Need:
    """Raises `ConfigError` for the first value that is not as needed, or no finite number."""

    def need(ok: bool, key: str, remedy: str) -> None:
        if not ok:
            raise ConfigError(f"{key}={errors.value_at(tree, key)!r}: {remedy}")

    for key, value in leaves(tree):
        need(not isinstance(value, float) or math.isfinite(value), key, "must be a finite number")
    return need


def leaves(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every value of the tree with its dotted key."""
    if isinstance(tree, (dict, list)):
        for name, branch in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from leaves(branch, f"{prefix}.{name}" if prefix else str(name))
    else:
        yield prefix, tree


def drafts(name: str, value: Any) -> bool:
    """Whether this argument of vLLM asks for speculative decoding: speculative_config, spec_method
    and their like, which a command line may shorten and divide by dots."""
    return name.replace("-", "_").startswith("spec") and value is not None
