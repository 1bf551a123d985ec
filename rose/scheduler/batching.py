"""What a training step consumes."""

from __future__ import annotations

import math
from typing import Any

from rose.scheduler.events import Action, AdmitGroup, DropGroup, StartTraining


class Synchronous:
    """A step trains on exactly its own groups, all made by the current version.

    A group that the filter refuses is replaced by the next prompt (DAPO's dynamic sampling), up to
    `max_admitted` times the groups wanted; from then on refused groups are used, newest last, so that
    a solved task can't sample for ever. `oversample` > 1 starts more than needed, takes the first
    that finish and drops the rest.
    """

    def __init__(self, oversample: float, max_admitted: float) -> None:
        if oversample < 1 or max_admitted < oversample:
            raise ValueError(f"oversample={oversample:g} must be at least 1, and max_admitted={max_admitted:g} "
                             "no smaller than it")
        self.oversample, self.max_admitted = oversample, max_admitted
        self._next = 0  # index of the next group of the prompt stream
        self._step = 0
        self._wanted = 0
        self._open: list[str] = []  # admitted, unfinished, in order
        self._accepted: list[str] = []
        self._refused: list[str] = []
        self._admitted = 0

    def begin(self, step: int, groups: int) -> list[Action]:
        self._step, self._wanted, self._admitted = step, groups, 0
        self._open, self._accepted, self._refused = [], [], []
        return [self._admit() for _ in range(math.ceil(groups * self.oversample))]

    def finished(self, group: str, accepted: bool) -> list[Action]:
        if group not in self._open:
            return []  # dropped meanwhile
        self._open.remove(group)
        (self._accepted if accepted else self._refused).append(group)
        if len(self._accepted) < self._wanted:
            if len(self._open) + len(self._accepted) >= self._wanted:
                return []
            if self._admitted < self._wanted * self.max_admitted:
                return [self._admit()]
            if self._open:
                return []
        return self._close()

    def _close(self) -> list[Action]:
        taken = (self._accepted + self._refused)[: self._wanted]
        dropped = [DropGroup(g) for g in self._open + self._accepted + self._refused if g not in taken]
        self._open, self._wanted = [], 0
        return [*dropped, StartTraining(self._step, sorted(taken, key=group_index))]

    def _admit(self) -> Action:
        group = f"g{self._next}"
        self._next += 1
        self._admitted += 1
        self._open.append(group)
        return AdmitGroup(self._next - 1, group)

    def snapshot(self) -> dict[str, Any]:
        return {"next": self._next}

    def restore(self, state: dict[str, Any]) -> None:
        self._next = state["next"]


def group_index(group: str) -> int:
    """``g12`` -> 12."""
    return int(group[1:])
