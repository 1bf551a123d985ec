"""One way for the scheduler's actions, live and simulated: one queue that one loop drains.

    event -> scheduler.handle -> journal -> carry out each action, in the scheduler's order
      ^                                                  |
      +------- events that this causes wait here <-------+

Carrying out an action may cause events (a group that is dropped ends its turns). They are handled
after all actions of the event before them, never in their midst, so that nobody sorts actions anew
and no call leads back into itself. Until such an event is handled the scheduler believes what is
over already: an action about a turn that an action before it has ended is passed over by whoever
carries actions out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Protocol

from rose.scheduler.events import Action, Event


class Journal(Protocol):
    """Such as rose.coordinator.journal.Journal."""

    def write(self, event: Event, actions: list[Action]) -> None: ...


class Decider(Protocol):
    """The scheduler, or what stands for it."""

    def handle(self, event: Event) -> list[Action]: ...


class ActionQueue:
    """`carry_out` does one action of the scheduler's, at once or by a message. What it raises goes
    to the caller of `feed`; events that still wait are handled by the next `feed`, before its
    own."""

    def __init__(
        self,
        scheduler: Decider,
        carry_out: Callable[[Action], None],
        journal: Journal | None = None,
    ) -> None:
        self._scheduler, self._carry_out, self._journal = scheduler, carry_out, journal
        self._events: deque[Event] = deque()
        self._draining = False

    def feed(self, event: Event) -> None:
        """Pass the event to the scheduler, and do its actions, before this returns; called while an
        action is carried out, after the actions that are left."""
        self._events.append(event)
        if self._draining:
            return
        self._draining = True
        try:
            while self._events:
                self._drain(self._events.popleft())
        finally:
            self._draining = False

    def _drain(self, event: Event) -> None:
        actions = self._scheduler.handle(event)
        if self._journal is not None:
            self._journal.write(event, actions)
        for action in actions:
            self._carry_out(action)
