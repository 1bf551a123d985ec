"""Carry-over: a step doesn't wait for its longest trajectories, and none is dropped for that."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from rose.policies.batches import Stream
from rose.scheduler.events import Action, DropGroup, StartTraining
from rose.scheduler.groups import group_index


@dataclass
class _Open:
    version: int  # newest version when the group was admitted
    finished: bool = False


@dataclass
class _Step:
    number: int
    groups: int  # number of groups wanted


@dataclass
class _State:
    version: int = 0
    training: bool = False
    step: _Step | None = None  # the step that waits for its batch
    # Groups that aren't trained yet, in order of admission
    open: dict[str, _Open] = field(default_factory=dict)
    done: list[str] = field(default_factory=list)  # finished groups of `open`, in order of finish
    admitted: int = 0  # groups admitted since this step began


class CarryOver:
    """Train on the groups that finish first, oldest version first. The others run on during the
    training and belong to the next steps. Nothing is dropped, so long trajectories are neither lost
    nor under-represented.

    Ours. The parts are known (AReaL's staleness bound, partial rollouts); the rule below makes them
    safe together. A group admitted at version a must be trained at version a + `staleness` at the
    latest. A batch of G groups is taken only if the remaining groups can all meet their deadlines
    with one batch per version: at most k G of them are due within the next k batches (earliest
    deadline first). Otherwise the step waits for older groups. So the bound holds without dropping,
    which AReaL's count alone doesn't achieve.

    `carry` is the number of batches in flight beyond the G groups of a step, at most `staleness`.
    In the steady state the share min(carry, 1) of a batch is one version old; with carry above 1 it
    is older. carry=0 is synchronous. A refused group (DAPO's dynamic sampling) is replaced
    until `max_admitted` times G groups were admitted for the step; after that it is used.
    """

    trainer_waits = True

    def __init__(self, staleness: int, carry: float, max_admitted: float) -> None:
        if staleness < 0 or not 0 <= carry <= staleness or max_admitted < 1:
            raise ValueError(
                f"staleness={staleness}, carry={carry}, max_admitted={max_admitted}: 0 <= carry <= "
                "staleness, and max_admitted at least 1"
            )
        self.staleness, self.carry, self.max_admitted = staleness, carry, max_admitted
        self._stream = Stream()
        self._batch = 0  # G, groups of a batch
        self._state = _State()

    def begin(self, step: int, groups: int) -> list[Action]:
        self._batch = groups
        self._state.training = False
        self._state.step, self._state.admitted = _Step(step, groups), 0
        return self._go_on()

    def published(self, version: int) -> list[Action]:
        self._state.version, self._state.training = version, False
        return []  # StepBegun follows, which admits groups.

    def finished(self, group: str, accepted: bool) -> list[Action]:
        state = self._state
        if group not in state.open:
            return []
        if accepted or state.admitted >= self._batch * self.max_admitted:
            state.open[group].finished = True
            state.done.append(group)
        else:
            del state.open[group]
            return [DropGroup(group), *self._go_on()]
        return self._go_on()

    def _go_on(self) -> list[Action]:
        actions = self._admit()
        batch = self._cut()
        if batch:
            step, self._state.step, self._state.training = self._state.step, None, True
            for group in batch:
                del self._state.open[group]
            taken = set(batch)
            self._state.done = [g for g in self._state.done if g not in taken]
            actions += [StartTraining(step.number, sorted(batch, key=group_index)), *self._admit()]
        return actions

    def _cut(self) -> list[str]:
        """Return the groups of the batch; [] if it is incomplete, or if groups that it leaves would
        miss their deadlines."""
        state = self._state
        if state.step is None or len(state.done) < state.step.groups:
            return []
        batch = sorted(state.done, key=lambda g: state.open[g].version)[: state.step.groups]
        taken = set(batch)
        left = [o.version for g, o in state.open.items() if g not in taken]
        return batch if self._feasible(left, state.version + 1) else []

    def certain(self) -> list[str]:
        """Return the finished groups that the waiting step will train in any case.

        A step takes finished groups of the oldest versions first. So a group is certain if fewer
        than a batch precede it: groups of older versions, and groups of its version that finished
        before it.
        """
        state = self._state
        if state.step is None:
            return []
        found = []
        for place, group in enumerate(state.done):
            version = state.open[group].version
            older = sum(each.version < version for each in state.open.values())
            sooner = sum(state.open[g].version == version for g in state.done[:place])
            if older + sooner < state.step.groups:
                found.append(group)
        return found

    def _feasible(self, versions: list[int], first: int) -> bool:
        """True if groups admitted at these versions can all be trained in time, when the first
        batch is trained at version `first`."""
        due = [0] * (self.staleness + 1)  # index k: groups that may let k batches go first
        for version in versions:
            slack = version + self.staleness - first
            if slack < 0:
                return False
            due[min(slack, self.staleness)] += 1
        total = 0
        for k, count in enumerate(due):
            total += count
            if total > (k + 1) * self._batch:
                return False
        return True

    def _admit(self) -> list[Action]:
        state = self._state
        actions: list[Action] = []
        # Groups in flight while the trainer trains will be at least one version old when they are
        # trained, so they may be no more than `carry` batches.
        room = math.ceil(self._batch * (self.carry if state.training else 1 + self.carry)) - len(
            state.open
        )
        for _ in range(room):
            action = self._stream.admit()
            state.open[action.group] = _Open(state.version)
            state.admitted += 1
            actions.append(action)
        return actions

    def snapshot(self) -> dict[str, Any]:
        return self._stream.snapshot(self._state.open)

    def restore(self, state: dict[str, Any]) -> None:
        self._stream.restore(state)
