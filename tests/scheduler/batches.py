"""Driver of a single batching policy, in place of the trainer and the environments: groups end in
any order, the filter refuses some, versions are published while groups run, and the run may end and
resume at any step boundary."""

from __future__ import annotations

import json
from collections.abc import Callable
from random import Random

from rose.scheduler import events as ev
from rose.scheduler.groups import group_index


class Trainer:
    """Trainer and environments in one. Each action is checked against what must hold for every
    policy. `admitted`: group -> version; `trained`: (version, groups) of each step."""

    def __init__(self, make: Callable, groups: int) -> None:
        self.make, self.groups = make, groups
        self.policy = make()
        self.version, self.step = 0, 0
        self.admitted: dict[str, int] = {}
        self.running: list[str] = []
        self.held: list[str] = []  # finished groups that aren't trained or dropped
        self.trained: list[tuple[int, list[str]]] = []
        self.dropped: list[str] = []
        self.fate: dict[int, str] = {}  # index of the stream -> open, trained, dropped or lost
        self.waits = False
        self.promised: dict[str, None] = {}  # groups reported as certain for the waiting step
        self.early = 0  # number of groups reported before their batch was complete
        self.publish(0)

    def do(self, actions: list[ev.Action]) -> None:
        for action in actions:
            match action:
                case ev.AdmitGroup(index, group):
                    assert group not in self.admitted, "names are unique within an attempt"
                    assert self.fate.get(index) in (None, "dropped", "lost"), "the first try counts"
                    assert group_index(group) == index
                    self.admitted[group], self.fate[index] = self.version, "open"
                    self.running.append(group)
                case ev.DropGroup(group):
                    (self.running if group in self.running else self.held).remove(group)
                    self.dropped.append(group)
                    self.fate[group_index(group)] = "dropped"
                case ev.StartTraining(step, groups):
                    assert self.waits and step == self.step, "one batch per step"
                    assert len(groups) == self.groups and groups == sorted(groups, key=group_index)
                    assert self.promised.keys() < set(groups), "a certain group isn't trained"
                    self.early += len(self.promised)
                    self.promised.clear()
                    for group in groups:
                        self.held.remove(group)
                        self.fate[group_index(group)] = "trained"
                    self.trained.append((self.version, groups))
                    self.waits = False

    def begin(self) -> None:
        self.step += 1
        self.waits = True
        self.do(self.policy.begin(self.step, self.groups))
        self.promise()

    def finish(self, *groups: str, accepted: bool = True) -> None:
        for group in groups:
            self.running.remove(group)
            self.held.append(group)
            self.do(self.policy.finished(group, accepted))
            self.promise()

    def promise(self) -> None:
        certain = self.policy.certain()
        assert set(certain) <= set(self.held) and (self.waits or not certain)
        assert self.promised.keys() <= set(certain) or not self.waits, "what is certain remains so"
        self.promised |= dict.fromkeys(certain)

    def publish(self, version: int) -> None:
        self.version = version
        if hasattr(self.policy, "published"):
            self.do(self.policy.published(version))

    def end_step(self) -> None:
        assert not self.waits
        self.publish(self.version + 1)

    def next_step(self) -> None:
        self.end_step()
        self.begin()

    def resume(self) -> None:
        """End the run at a step boundary, and continue with another attempt."""
        state = json.loads(json.dumps(self.policy.snapshot()))
        for group in [*self.running, *self.held]:
            self.fate[group_index(group)] = "lost"
            del self.admitted[group]  # It is admitted again with the same name.
        self.running, self.held = [], []
        self.policy = self.make()
        self.policy.restore(state)
        self.publish(self.version)

    def run_step(self, random: Random, refuses: float = 0.0, slow: int = 0) -> None:
        """Run a step whose groups end in any order. Indices divisible by `slow`, if that isn't 0,
        end only when a step waits and no other group runs."""
        self.begin()
        while self.waits:
            self.finish_one(random, refuses, slow)
        for _ in range(random.randrange(2 * self.groups)):
            if self.fast(slow):
                self.finish_one(random, refuses, slow)
        self.end_step()

    def finish_one(self, random: Random, refuses: float, slow: int) -> None:
        assert self.running, "a step waits, and nothing runs"
        group = random.choice(self.fast(slow) or self.running)
        self.finish(group, accepted=random.random() >= refuses)

    def fast(self, slow: int) -> list[str]:
        return [group for group in self.running if not slow or group_index(group) % slow]

    def overdue(self, bound: int) -> list[str]:
        """Return the open groups that are already too old for the next step."""
        left = [*self.running, *self.held]
        return [group for group in left if self.version - self.admitted[group] > bound]

    def staleness(self) -> list[int]:
        admitted = self.admitted
        return [version - admitted[group] for version, groups in self.trained for group in groups]

    def check_accounts(self) -> None:
        """Assert that every index up to the newest was trained, was dropped on purpose, is open, or
        will be tried again."""
        state = self.policy.snapshot()
        again = {index for index, _ in state["again"]}
        assert sorted(self.fate) == list(range(len(self.fate)))
        for index, fate in self.fate.items():
            assert fate != "lost" or index in again, f"prompt {index} was skipped silently"
            assert fate != "open" or index in again, f"prompt {index} would be, at a stop"
            assert fate != "trained" or index not in again, f"prompt {index} would be trained twice"
