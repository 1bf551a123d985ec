"""Carry-over: a step doesn't wait for its tail, and nothing is dropped for it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from rose.scheduler.events import Action, AdmitGroup, DropGroup, StartTraining
from rose.scheduler.groups import group_index, group_name, group_retry


@dataclass
class _Open:
    version: int  # at which it was admitted
    finished: bool = False


@dataclass
class _Step:
    number: int
    groups: int  # wanted


@dataclass
class _State:
    version: int = 0
    training: bool = False
    step: _Step | None = None  # begun, and not trained yet
    # admitted and not trained, in order of admission
    open: dict[str, _Open] = field(default_factory=dict)
    done: list[str] = field(default_factory=list)  # the finished of these, in order of finish
    admitted: int = 0  # for this step


class CarryOver:
    """A step trains on the first of its groups that finish, oldest version first; the tail goes on
    through training and belongs to the next steps. Nothing is dropped, so that long trajectories
    are neither lost nor under-represented.

    Ours; the parts are known (AReaL's staleness bound, partial rollouts), the admission rule is
    what makes them safe together. Groups are work with deadlines: one admitted at version a must be
    trained at version a + `staleness` at the latest. A group is admitted, and a step is cut, only
    where every deadline can still be met at one batch of G groups per version (earliest deadline
    first: of the groups left, at most k G are due within the next k batches); else the step waits
    for the older ones. So the bound holds without dropping, which AReaL's count alone does not
    give. `carry`, in batches: groups in flight beyond the G of a step; at most `staleness`. Of a
    batch the share min(carry, 1) is one version old in the steady state, or older with more of it,
    and 0 is synchronous training. A refused group (DAPO's dynamic sampling) is replaced until
    `max_admitted` times G were admitted for the step; then it is used.
    """

    def __init__(self, staleness: int, carry: float, max_admitted: float) -> None:
        if staleness < 0 or not 0 <= carry <= staleness or max_admitted < 1:
            raise ValueError(
                f"staleness={staleness}, carry={carry}, max_admitted={max_admitted}: 0 <= carry <= "
                "staleness, and max_admitted at least 1"
            )
        self.staleness, self.carry, self.max_admitted = staleness, carry, max_admitted
        self._next = 0  # index of the next group of the prompt stream
        self._again: list[
            tuple[int, int]
        ] = []  # (index, try) of groups that an earlier attempt of the run lost
        self._batch = 0  # G
        self._state = _State()

    def begin(self, step: int, groups: int) -> list[Action]:
        self._batch = groups
        self._state.training = False
        self._state.step, self._state.admitted = _Step(step, groups), 0
        return self._go_on()

    def published(self, version: int) -> list[Action]:
        self._state.version, self._state.training = version, False
        return []  # StepBegun follows

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
        """The batch, or nothing while it is not complete or leaves too many deadlines behind."""
        state = self._state
        if state.step is None or len(state.done) < state.step.groups:
            return []
        batch = sorted(state.done, key=lambda g: state.open[g].version)[: state.step.groups]
        taken = set(batch)
        left = [o.version for g, o in state.open.items() if g not in taken]
        return batch if self._feasible(left, state.version + 1) else []

    def certain(self) -> list[str]:
        """A step takes the finished groups of the oldest versions, so those with fewer than a batch
        before them: of an older version, or of theirs and finished sooner."""
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
        """Whether groups admitted at these versions can all be trained in time, the first batch at
        version `first`."""
        due = [0] * (self.staleness + 1)  # groups by the number of batches that they may wait for
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
        # While the trainer trains, what is in flight will be a version old at best: no more of that
        # than the carry.
        room = math.ceil(self._batch * (self.carry if state.training else 1 + self.carry)) - len(
            state.open
        )
        for _ in range(room):
            index, retry = self._again.pop(0) if self._again else (self._next, 0)
            self._next = max(self._next, index + 1)
            group = group_name(index, retry)
            state.open[group] = _Open(state.version)
            state.admitted += 1
            actions.append(AdmitGroup(index, group))
        return actions

    def snapshot(self) -> dict[str, Any]:
        """Groups in flight end with the run's attempt: the next one begins them anew, under their
        names, by which their recorded turns are found."""
        lost = [(group_index(g), group_retry(g)) for g in self._state.open]
        return {"next": self._next, "again": [*lost, *self._again]}

    def restore(self, state: dict[str, Any]) -> None:
        self._next, self._again = state["next"], [tuple(again) for again in state.get("again", [])]
