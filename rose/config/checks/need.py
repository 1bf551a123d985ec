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
# What clocks, memory and threads can be counted in, by the end of a key's name: larger values are
# refused by what has started already.
MOST = {
    "_s": (1e9, "at most 1e9 seconds, 31 years"),
    "_gib": (1e6, "at most 1e6 GiB"),
    "threads": (2**12, f"at most {2**12}"),
}
MOST_AT_ONCE = 10**7  # trajectories of a batch or an evaluation, which the coordinator lists
MOST_WHOLE, MOST_OTHER = 2**63 - 1, 1e15  # of all others; seeds use all bits of a machine's integer


def needs(tree: dict[str, Any]) -> Need:
    """Raises `ConfigError` for the first value that is not as needed, no finite number, or larger
    than can be counted with."""

    def need(ok: bool, key: str, remedy: str) -> None:
        if not ok:
            raise ConfigError(f"{key}={errors.value_at(tree, key)!r}: {remedy}")

    for key, value in leaves(tree):
        need(not isinstance(value, float) or math.isfinite(value), key, "must be a finite number")
        if isinstance(value, (int, float)):
            _check_size(key, value, need)
    return need


def _check_size(key: str, value: float, need: Need) -> None:
    for end, (most, words) in MOST.items():
        of_it = key.endswith(end) and ".factors." not in key  # which have no unit
        need(not of_it or value <= most, key, words)
    if isinstance(value, int):
        need(abs(value) <= MOST_WHOLE, key, "must be below 2**63")
    else:
        need(abs(value) <= MOST_OTHER, key, f"at most {MOST_OTHER:g}")


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
