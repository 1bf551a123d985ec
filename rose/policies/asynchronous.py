"""Base class of the asynchronous batching policies: groups of several versions."""

from __future__ import annotations

from typing import Any

from rose.policies.batches import Stream, check
from rose.scheduler.events import Action, DropGroup, StartTraining
from rose.scheduler.groups import group_index


class Asynchronous:
    """Asynchronous batching: rollouts continue while the trainer trains. The staleness of a group
    is the version that its step trains from, minus the newest version at its admission. It never
    exceeds `staleness`.

    Up to `1 + staleness` batches of groups are admitted and untrained. A step takes the oldest
    accepted groups. A refused group is dropped and replaced. Once `max_admitted - 1` batches of
    groups have been replaced since the last step, further refused groups fill up the batch behind
    accepted ones. Otherwise a solved task, whose groups are all refused, would sample forever.
    """

    def __init__(self, staleness: int, max_admitted: float) -> None:
        check(max_admitted)
        self.staleness, self.max_admitted = staleness, max_admitted
        self._stream = Stream()
        self._version = -1
        self._step = 0
        self._groups = 0  # groups of a batch
        self._wanted = False  # True while a step waits for its batch
        # Group that isn't trained yet -> version at its admission, in order of admission
        self._admitted: dict[str, int] = {}
        self._running: dict[str, None] = {}  # unfinished groups, in order of admission
        self._accepted: dict[str, None] = {}
        self._refused: dict[str, None] = {}  # refused groups that can fill up a batch
        self._replaced = 0  # refused groups replaced since the last step
        self._training = 0  # groups in the trainer

    def begin(self, step: int, groups: int) -> list[Action]:
        self._step, self._groups, self._wanted = step, groups, True
        return self._go_on()

    def finished(self, group: str, accepted: bool) -> list[Action]:
        if group not in self._running:
            return []  # The group was dropped before.
        del self._running[group]
        if accepted:
            self._accepted[group] = None
        elif self._replaced + 1 > self._groups * (self.max_admitted - 1):
            self._refused[group] = None
        else:
            self._replaced += 1
            del self._admitted[group]
            return [DropGroup(group), *self._go_on()]
        return self._go_on()

    def published(self, version: int) -> list[Action]:
        self._version, self._training = version, 0
        stale = [g for g, admitted in self._admitted.items() if version - admitted > self.staleness]
        gone = [self._drop(g) if g in self._refused else self._expire(g) for g in stale]
        return gone + self._go_on()

    def _go_on(self) -> list[Action]:
        """Start training if a batch is complete, and admit groups while there is room."""
        return self._train() + self._fill()

    def _fill(self) -> list[Action]:
        actions: list[Action] = []
        while self._has_room():
            action = self._stream.admit()
            self._admitted[action.group] = self._version
            self._running[action.group] = None
            actions.append(action)
        return actions

    def _has_room(self) -> bool:
        """True if one more group may be admitted."""
        return len(self._admitted) < self._groups * (1 + self.staleness)

    def _train(self) -> list[Action]:
        """Start the waiting step's training if its batch is complete and need not wait."""
        is_complete = len(self._accepted) + len(self._refused) >= self._groups
        if not self._wanted or not is_complete or self._must_wait():
            return []
        accepted = [g for g in self._admitted if g in self._accepted][: self._groups]
        taken = accepted + list(self._refused)[: self._groups - len(accepted)]
        for group in taken:
            self._forget(group)
        dropped = [self._drop(group) for group in list(self._refused)]
        self._wanted, self._replaced, self._training = False, 0, len(taken)
        return [*dropped, StartTraining(self._step, sorted(taken, key=group_index))]

    def certain(self) -> list[str]:
        """Return the accepted groups that the waiting step will train in any case.

        A step takes the accepted groups that were admitted first. So an accepted group is certain
        if fewer than a batch of running or accepted groups were admitted before it.
        """
        if not self._wanted:
            return []
        first = [g for g in self._admitted if g not in self._refused][: self._groups]
        return [g for g in first if g in self._accepted]

    def _must_wait(self) -> bool:
        """True if a complete batch must wait for older groups."""
        return False

    def _expire(self, group: str) -> Action:
        """Drop a group that is too old for any step, and let its prompt start again."""
        self._stream.put_back(group)
        return self._drop(group)

    def _drop(self, group: str) -> Action:
        self._forget(group)
        return DropGroup(group)

    def _forget(self, group: str) -> None:
        del self._admitted[group]
        for groups in (self._running, self._accepted, self._refused):
            groups.pop(group, None)

    def snapshot(self) -> dict[str, Any]:
        return self._stream.snapshot(self._admitted)

    def restore(self, state: dict[str, Any]) -> None:
        self._stream.restore(state)
