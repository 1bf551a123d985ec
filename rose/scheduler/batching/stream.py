"""The prompt stream, as batching policies take from it: an index is trained, dropped on purpose, or
tried again."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

from rose.scheduler.events import AdmitGroup
from rose.scheduler.groups import group_index, group_name, group_retry


class Stream:
    """Indices 0, 1, ...; those put back come first, each under a new name."""

    def __init__(self) -> None:
        self._next = 0
        self._again: deque[tuple[int, int]] = deque()  # (index, its next try)

    @property
    def waiting(self) -> int:
        """Groups that were put back."""
        return len(self._again)

    def admit(self) -> AdmitGroup:
        """What was put back first, else the next index."""
        if self._again:
            index, retry = self._again.popleft()
            return AdmitGroup(index, group_name(index, retry))
        return self.admit_new()

    def admit_new(self, spare: float = 0.0) -> AdmitGroup:
        """The next index, whatever was put back."""
        self._next += 1
        return AdmitGroup(self._next - 1, group_name(self._next - 1), spare)

    def put_back(self, group: str) -> None:
        self._again.append((group_index(group), group_retry(group) + 1))

    def snapshot(self, unfinished: Iterable[str]) -> dict[str, Any]:
        """`unfinished`: groups admitted and not trained, first admitted first. Their processes end
        with the run, so `restore` tries them again, before those that were put back earlier."""
        lost = [[group_index(g), group_retry(g) + 1] for g in unfinished]
        return {"next": self._next, "again": lost + [list(entry) for entry in self._again]}

    def restore(self, state: dict[str, Any]) -> None:
        """Another policy's, too: the form is the same. Checkpoints from before there were second
        tries lack `again`."""
        self._next = state["next"]
        self._again = deque((index, retry) for index, retry in state.get("again", []))
