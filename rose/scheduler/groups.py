"""Names of groups: ``g12`` is prompt 12 of the stream, ``g12r1`` its second try.

Names are unique within an attempt of the run. The next attempt starts unfinished groups again from
the beginning, under the same names.
"""

from __future__ import annotations


def group_name(index: int, retry: int = 0) -> str:
    """Return the group's name: (12, 0) -> ``g12``; (12, 1) -> ``g12r1``."""
    return f"g{index}r{retry}" if retry else f"g{index}"


def group_index(group: str) -> int:
    """Return the index in the prompt stream: ``g12`` and ``g12r1`` -> 12."""
    return int(group[1:].partition("r")[0])


def group_retry(group: str) -> int:
    """Return how often the prompt was tried before: ``g12`` -> 0, ``g12r1`` -> 1."""
    return int(group[1:].partition("r")[2] or 0)
