"""Names in ascending order of a key that changes often, while mostly the first is asked for."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heapify, heappop, heappush
from typing import Any

CLEAR_AT = 3  # entries per name before the heap is made anew


class Ranking:
    """A heap in which old entries stay until they come up, or until there are CLEAR_AT times as
    many as names: cheaper to change than a sorted list (docs/benchmarks.md, "Scheduler and
    simulator"). Names with equal keys go by name."""

    def __init__(self) -> None:
        self._heap: list[tuple[Any, ...]] = []  # (*key, name)
        self._entries: dict[str, tuple[Any, ...]] = {}  # the one of each name that is true

    def add(self, name: str, *key: float) -> None:
        """Rank the item by this key from now on, whether it was in or not."""
        entries, heap = self._entries, self._heap
        entry = entries[name] = *key, name
        heappush(heap, entry)
        if len(heap) > CLEAR_AT * len(entries) + 16:
            heap[:] = entries.values()
            heapify(heap)

    def remove(self, name: str) -> None:
        """Raises `KeyError`."""
        del self._entries[name]

    def first(self) -> tuple[Any, ...]:
        """(*key, name) of the first. Raises `IndexError` if there is none."""
        heap, entries = self._heap, self._entries
        while True:
            entry = heap[0]
            if entries.get(entry[-1]) is entry:
                return entry
            heappop(heap)

    def find(
        self, suits: Callable[[str], bool], among: int, all_of_them: bool = False
    ) -> list[tuple[Any, ...]]:
        """Among the first `among`, in order, find the first that suits, or all that do; [] if none
        does."""
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
