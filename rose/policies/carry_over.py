"""Carry-over: a step doesn't wait for its longest trajectories; a later step trains them."""

from __future__ import annotations

import math
from typing import Any

from rose.policies.batches import Stream
from rose.scheduler.events import Action, DropGroup, StartTraining
from rose.scheduler.groups import group_index


class CarryOver:
    """Train on the groups that finish first, oldest version first. The other groups continue during
    the training and belong to later steps. Nothing is dropped, so long trajectories are neither
    lost nor under-represented.

    Ours. The parts are known (AReaL's staleness bound, partial rollouts); the rule below combines
    them safely. A group admitted at version a must be trained at version a + `staleness` at the
    latest. A batch of G groups is taken only if the remaining groups can all meet their deadlines
    with one batch per version: at most k G of them are due within the next k batches (earliest
    deadline first). Otherwise the step waits for older groups. So the bound holds without dropping
    groups. AReaL's count of admitted groups alone doesn't achieve this.

    `carry` is the number of batches in flight beyond the G groups of a step, at most `staleness`.
    In the steady state, the share min(carry, 1) of a batch is one version old; with carry above 1,
    it is older. carry=0 is synchronous. A refused group (DAPO's dynamic sampling) is replaced
    until `max_admitted` times G groups were admitted for the step; after that it is used.
    """

    trainer_waits = True

    def __init__(self, staleness: int, carry: float, max_admitted: float) -> None:
        if staleness < 0 or not 0 <= carry <= staleness or max_admitted < 1:
            raise ValueError(
                f"staleness={staleness}, carry={carry}, max_admitted={max_admitted}: carry must "
                "be from 0 to staleness, and max_admitted at least 1"
            )
        self.staleness, self.carry, self.max_admitted = staleness, carry, max_admitted
        self._stream = Stream()
        self._batch = 0  # G, groups of a batch
        self._version = 0  # newest
        self._training = False
        self._step: int | None = None  # the step that waits for its batch
        # Group that isn't trained yet -> newest version when it was admitted, in order of admission
        self._open: dict[str, int] = {}
        self._done: list[str] = []  # finished groups of `_open`, in order of finish
        self._admitted = 0  # groups admitted since this step began

    def begin(self, step: int, groups: int) -> list[Action]:
        self._batch, self._training = groups, False
        self._step, self._admitted = step, 0
        return self._go_on()

    def published(self, version: int) -> list[Action]:
        self._version, self._training = version, False
        return []  # StepBegun follows, which admits groups.

    def finished(self, group: str, accepted: bool) -> list[Action]:
        if group not in self._open:
            return []
        if accepted or self._admitted >= self._batch * self.max_admitted:
            self._done.append(group)
        else:
            del self._open[group]
            return [DropGroup(group), *self._go_on()]
        return self._go_on()

    def _go_on(self) -> list[Action]:
        """Admit groups, and start training if a batch can be taken."""
        actions = self._admit()
        batch = self._cut()
        if batch:
            step, self._step, self._training = self._step, None, True
            for group in batch:
                del self._open[group]
            taken = set(batch)
            self._done = [g for g in self._done if g not in taken]
            actions += [StartTraining(step, sorted(batch, key=group_index)), *self._admit()]
        return actions

    def _cut(self) -> list[str]:
        """Return the groups of the next batch; [] if too few are finished, or if the remaining
        groups would miss their deadlines."""
        if self._step is None or len(self._done) < self._batch:
            return []
        batch = sorted(self._done, key=lambda g: self._open[g])[: self._batch]
        taken = set(batch)
        left = [version for g, version in self._open.items() if g not in taken]
        return batch if self._feasible(left, self._version + 1) else []

    def certain(self) -> list[str]:
        """Return the finished groups that the waiting step will train in any case.

        A step takes finished groups of the oldest versions first. So a group is certain if fewer
        than a batch precede it: groups of older versions, and groups of its version that finished
        before it.
        """
        if self._step is None:
            return []
        found = []
        for place, group in enumerate(self._done):
            version = self._open[group]
            older = sum(each < version for each in self._open.values())
            sooner = sum(self._open[g] == version for g in self._done[:place])
            if older + sooner < self._batch:
                found.append(group)
        return found

    def _feasible(self, versions: list[int], first: int) -> bool:
        """True if groups admitted at these versions can all be trained in time, the oldest first,
        when the first batch is trained at version `first`."""
        return all(
            first + place // self._batch <= version + self.staleness
            for place, version in enumerate(sorted(versions))
        )

    def _admit(self) -> list[Action]:
        """Admit groups up to the bound on groups in flight."""
        actions: list[Action] = []
        # Groups in flight while the trainer trains will be at least one version old when they are
        # trained, so they may be no more than `carry` batches.
        most = math.ceil(self._batch * (self.carry if self._training else 1 + self.carry))
        for _ in range(most - len(self._open)):
            action = self._stream.admit()
            self._open[action.group] = self._version
            self._admitted += 1
            actions.append(action)
        return actions

    def snapshot(self) -> dict[str, Any]:
        return self._stream.snapshot(self._open)

    def restore(self, state: dict[str, Any]) -> None:
        self._stream.restore(state)
