"""Ranking of names by a key that changes often, for callers that mostly want the first name."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heapify, heappop, heappush
from typing import Any

REBUILD_AT = 3  # entries per name at which the heap is rebuilt


class Ranking:
    """Heap with lazy deletion, in ascending order of key, then name.

    Outdated entries stay until they reach the top, or until the heap has REBUILD_AT entries per
    name and is rebuilt. A change is cheaper than in a sorted list (docs/benchmarks.md, "Scheduler
    and simulator").
    """

    def __init__(self) -> None:
        self._heap: list[tuple[Any, ...]] = []  # (*key, name)
        self._entries: dict[str, tuple[Any, ...]] = {}  # name -> its valid entry in the heap

    def add(self, name: str, *key: float) -> None:
        """Rank the name by this key. A name that is already ranked gets the new key."""
        entries, heap = self._entries, self._heap
        entry = entries[name] = *key, name
        heappush(heap, entry)
        if len(heap) > REBUILD_AT * len(entries) + 16:
            heap[:] = entries.values()
            heapify(heap)

    def remove(self, name: str) -> None:
        """Remove the name. Raises `KeyError` if it isn't ranked."""
        del self._entries[name]

    def first(self) -> tuple[Any, ...]:
        """Return the first entry, (*key, name). Raises `IndexError` if there is none."""
        heap, entries = self._heap, self._entries
        while True:
            entry = heap[0]
            if entries.get(entry[-1]) is entry:
                return entry
            heappop(heap)

    def find(
        self, suits: Callable[[str], bool], among: int, all_of_them: bool = False
    ) -> list[tuple[Any, ...]]:
        """Search the first `among` entries for names that suit. Return the first such entry, or
        all of them with `all_of_them`."""
        heap, seen, found = self._heap, [], []
        for _ in range(min(among, len(self._entries))):
            entry = self.first()
            if suits(entry[-1]):
                found.append(entry)
                if not all_of_them:
                    break
            seen.append(heappop(heap))
        for entry in seen:
            heappush(heap, entry)
        return found
