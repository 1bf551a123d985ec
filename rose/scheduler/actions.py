"""Event loop around the scheduler, used by the live coordinator and by the simulator.

    event -> scheduler.handle -> journal -> carry out each action, in the scheduler's order
      ^                                                  |
      +------- events that this causes wait here <-------+

Carrying out an action may cause events: a dropped group ends its turns. Such an event waits until
all actions of the current event are carried out. So actions keep the scheduler's order, and
`carry_out` never re-enters itself. While the event waits, the scheduler's state is out of date, and
an action may name a turn that an earlier action has ended. The driver must ignore such an action.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Protocol

from rose.scheduler.core import Scheduler
from rose.scheduler.events import Action, Event


class Journal(Protocol):
    """Interface of `rose.coordinator.journal.Journal`."""

    def write(self, event: Event, actions: list[Action]) -> None: ...


class ActionQueue:
    """Queue of events, with the loop that handles them.

    `carry_out` executes one action, directly or by sending a message. An exception that it raises
    reaches the caller of `feed`. Events that wait at that moment stay queued: the next `feed`
    handles them before its own event.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        carry_out: Callable[[Action], None],
        journal: Journal | None = None,
    ) -> None:
        self._scheduler, self._carry_out, self._journal = scheduler, carry_out, journal
        self._events: deque[Event] = deque()
        self._draining = False

    def feed(self, event: Event) -> None:
        """Handle the event and carry out its actions before returning.

        A call from within `carry_out` only queues the event. It is handled after the remaining
        actions of the current event.
        """
        self._events.append(event)
        if self._draining:
            return
        self._draining = True
        try:
            while self._events:
                event = self._events.popleft()
                actions = self._scheduler.handle(event)
                if self._journal is not None:
                    self._journal.write(event, actions)
                for action in actions:
                    self._carry_out(action)
        finally:
            self._draining = False
