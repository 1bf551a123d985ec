"""Helpers that every check uses."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

from rose.config import errors
from rose.config.errors import ConfigError

Need = Callable[[bool, str, str], None]  # need(ok, key, remedy), see `needs`
NO_DRAFTS = (
    "vLLM 0.32 on CPUs samples wrong tokens with speculative decoding, without saying so "
    "(vllm-project/vllm issue 55005): leave it out, or run on GPUs; for a run's own engines, "
    "where ROSE mends it, set rollout/draft"
)
# End of a key's name -> (its largest value, the remedy). The system would reject a larger value
# only after the run has started.
MOST = {
    "_s": (1e9, "at most 1e9 seconds, 31 years"),
    "_gib": (1e6, "at most 1e6 GiB"),
    "threads": (2**12, f"at most {2**12}"),
}
MOST_AT_ONCE = 10**7  # most trajectories of a batch or an evaluation; the coordinator lists them
MOST_WHOLE = 2**63 - 1  # largest integer of other keys; seeds use all bits
MOST_OTHER = 1e15  # largest float of other keys


def needs(tree: dict[str, Any]) -> Need:
    """Return need(ok, key, remedy), which raises `ConfigError` unless `ok`. The error has the key,
    its value in `tree` and the remedy. First check that all numbers of `tree` are finite and not
    too large."""

    def need(ok: bool, key: str, remedy: str) -> None:
        if not ok:
            raise ConfigError(f"{key}={errors.value_at(tree, key)!r}: {remedy}")

    for key, value in leaves(tree):
        need(not isinstance(value, float) or math.isfinite(value), key, "must be a finite number")
        if isinstance(value, (int, float)):
            _check_size(key, value, need)
    return need


def _check_size(key: str, value: float, need: Need) -> None:
    """Check that a key's number is not too large."""
    for end, (most, remedy) in MOST.items():
        bounded = key.endswith(end) and ".factors." not in key  # factors have no unit
        need(not bounded or value <= most, key, remedy)
    if isinstance(value, int):
        need(abs(value) <= MOST_WHOLE, key, "must be below 2**63")
    else:
        need(abs(value) <= MOST_OTHER, key, f"at most {MOST_OTHER:g}")


def leaves(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) for every value of the tree."""
    if isinstance(tree, (dict, list)):
        for name, branch in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from leaves(branch, f"{prefix}.{name}" if prefix else str(name))
    else:
        yield prefix, tree


def drafts(name: str, value: Any) -> bool:
    """True if this argument of vLLM asks for speculative decoding: speculative_config or
    spec_method, also in a short or dotted form as on a command line."""
    return name.replace("-", "_").startswith("spec") and value is not None
