"""Building blocks of batching policies: the prompt stream, and the groups of a step."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from rose.scheduler.events import Action, AdmitGroup, DropGroup, StartTraining
from rose.scheduler.groups import group_index, group_name, group_retry


class Stream:
    """The prompt stream: indices 0, 1, ... Prompts that were put back come first, each as a group
    with a new name."""

    def __init__(self) -> None:
        self._next = 0
        self._again: deque[tuple[int, int]] = deque()  # (index, number of its next try)

    @property
    def waiting(self) -> int:
        """Number of prompts that were put back and wait."""
        return len(self._again)

    def admit(self) -> AdmitGroup:
        """Admit the prompt that was put back first, else the next index."""
        if self._again:
            index, retry = self._again.popleft()
            return AdmitGroup(index, group_name(index, retry))
        return self.admit_new()

    def admit_new(self, spare: float = 0.0) -> AdmitGroup:
        """Admit the next index, even if prompts were put back."""
        self._next += 1
        return AdmitGroup(self._next - 1, group_name(self._next - 1), spare)

    def put_back(self, group: str) -> None:
        """Let the group's prompt be admitted again, before new prompts."""
        self._again.append((group_index(group), group_retry(group) + 1))

    def snapshot(self, unfinished: Iterable[str]) -> dict[str, Any]:
        """Return the state for a checkpoint.

        `unfinished` are the groups that are admitted and not trained, in order of admission. After
        a restart they start again, before the prompts that were put back, and keep their names, by
        which their recorded turns are found.
        """
        lost = [[group_index(g), group_retry(g)] for g in unfinished]
        return {"next": self._next, "again": lost + [list(entry) for entry in self._again]}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a `snapshot` of this or another batching policy. Checkpoints from before
        prompts could be put back lack `again`."""
        self._next = state["next"]
        self._again = deque((index, retry) for index, retry in state.get("again", []))


class Round:
    """The groups of one step. It admits groups until `groups` are accepted. `oversample` times
    `groups` are kept accepted or running.

    A refused group is replaced until `max_admitted` times `groups` were admitted. After that,
    refused groups fill the batch, newest last. Otherwise a solved task, whose groups are all
    refused, would sample forever.
    """

    def __init__(
        self, groups: int, admit: Callable[[], AdmitGroup], oversample: float, max_admitted: float
    ) -> None:
        self.size, self._admit = groups, admit
        self._target = math.ceil(groups * oversample)
        self._limit = groups * max_admitted
        self._admitted = 0
        self._open: dict[str, None] = {}  # unfinished groups, in order of admission
        self._accepted: list[str] = []
        self._refused: list[str] = []

    @property
    def open(self) -> list[str]:
        """The unfinished groups, in order of admission."""
        return list(self._open)

    @property
    def groups(self) -> list[str]:
        """All admitted groups, in order of the stream."""
        return sorted([*self._open, *self._accepted, *self._refused], key=group_index)

    @property
    def certain(self) -> list[str]:
        """The groups that `close` takes in any case; refused groups only fill up."""
        return self._accepted[: self.size]

    @property
    def complete(self) -> bool:
        """True if `close` can be called: enough groups are accepted, or none is unfinished."""
        return len(self._accepted) >= self.size or not self._open

    def fill(self) -> list[Action]:
        """Admit groups up to the targets of the round."""
        actions: list[Action] = []
        while len(self._open) + len(self._accepted) < self._target and self._admitted < self._limit:
            action = self._admit()
            self._open[action.group] = None
            self._admitted += 1
            actions.append(action)
        return actions

    def finished(self, group: str, accepted: bool) -> list[Action]:
        """Note the filter's verdict, and admit replacements. Ignores groups that aren't open."""
        if group not in self._open:
            return []
        del self._open[group]
        (self._accepted if accepted else self._refused).append(group)
        return [] if len(self._accepted) >= self.size else self.fill()

    def close(self, step: int) -> list[Action]:
        """Drop the groups that the batch doesn't take, and start the training."""
        taken = (self._accepted + self._refused)[: self.size]
        kept = set(taken)
        every = [*self._open, *self._accepted, *self._refused]
        dropped = [DropGroup(group) for group in every if group not in kept]
        return [*dropped, StartTraining(step, sorted(taken, key=group_index))]


def check(max_admitted: float, **factor: float) -> None:
    """Raise ValueError for bounds that can't be kept. `factor` is the name and value of the
    argument that says how many batches are started at once."""
    for name, value in factor.items():
        if not value >= 1:
            raise ValueError(f"{name}={value:g}: batches, at least 1")
    if not max_admitted >= max([1.0, *factor.values()]):
        raise ValueError(
            f"max_admitted={max_admitted:g}: batches, at least 1 and no fewer than are started at "
            f"once ({max([1.0, *factor.values()]):g})"
        )
