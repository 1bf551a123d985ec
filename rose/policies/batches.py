"""What batching policies take groups from, and gather them in: the prompt stream, and the groups of
a step."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from rose.scheduler.events import Action, AdmitGroup, DropGroup, StartTraining
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
        """Admit what was put back first, else the next index."""
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
        with the run's attempt; `restore` begins them anew, before those that were put back earlier,
        and under their names, by which their recorded turns are found."""
        lost = [[group_index(g), group_retry(g)] for g in unfinished]
        return {"next": self._next, "again": lost + [list(entry) for entry in self._again]}

    def restore(self, state: dict[str, Any]) -> None:
        """Another policy's, too: the form is the same. Checkpoints from before there were second
        tries lack `again`."""
        self._next = state["next"]
        self._again = deque((index, retry) for index, retry in state.get("again", []))


class Round:
    """Admits until `groups` are accepted; what the filter refuses is replaced, up to `max_admitted`
    times the groups.

    From then on refused groups fill the batch, newest last, so that a solved task can't sample for
    ever. It keeps `oversample` times the groups accepted or running and is complete with the first
    `groups` accepted.
    """

    def __init__(
        self, groups: int, admit: Callable[[], AdmitGroup], oversample: float, max_admitted: float
    ) -> None:
        self.size, self._admit = groups, admit
        self._target = math.ceil(groups * oversample)
        self._limit = groups * max_admitted
        self._admitted = 0
        self._open: dict[str, None] = {}  # in order of admission
        self._accepted: list[str] = []
        self._refused: list[str] = []

    @property
    def open(self) -> list[str]:
        """Admitted and unfinished, in order of admission."""
        return list(self._open)

    @property
    def groups(self) -> list[str]:
        """All that it holds, in order of the stream."""
        return sorted([*self._open, *self._accepted, *self._refused], key=group_index)

    @property
    def certain(self) -> list[str]:
        """Those that `close` takes in any case: refused groups only fill up."""
        return self._accepted[: self.size]

    @property
    def complete(self) -> bool:
        return len(self._accepted) >= self.size or not self._open

    def fill(self) -> list[Action]:
        actions: list[Action] = []
        while len(self._open) + len(self._accepted) < self._target and self._admitted < self._limit:
            action = self._admit()
            self._open[action.group] = None
            self._admitted += 1
            actions.append(action)
        return actions

    def finished(self, group: str, accepted: bool) -> list[Action]:
        """Nothing about a group that is not, or no longer, in it."""
        if group not in self._open:
            return []
        del self._open[group]
        (self._accepted if accepted else self._refused).append(group)
        return [] if len(self._accepted) >= self.size else self.fill()

    def close(self, step: int) -> list[Action]:
        """Drop what the batch does not take, and train."""
        taken = (self._accepted + self._refused)[: self.size]
        kept = set(taken)
        dropped = [
            DropGroup(g) for g in [*self._open, *self._accepted, *self._refused] if g not in kept
        ]
        return [*dropped, StartTraining(step, sorted(taken, key=group_index))]


def check(max_admitted: float, **factor: float) -> None:
    """`factor`: the name and value of what is started at once, in batches. Raises ValueError for
    bounds that can't be kept."""
    for name, value in factor.items():
        if not value >= 1:
            raise ValueError(f"{name}={value:g}: batches, at least 1")
    if not max_admitted >= max([1.0, *factor.values()]):
        raise ValueError(
            f"max_admitted={max_admitted:g}: batches, at least 1 and no fewer than are started at "
            f"once ({max([1.0, *factor.values()]):g})"
        )
