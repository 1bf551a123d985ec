"""`ActionQueue` keeps the scheduler's order of actions when carrying them out causes events."""

import pytest

from rose.scheduler import events as ev
from rose.scheduler.actions import ActionQueue


class Scripted:
    """A scheduler that returns the script's actions for the event's time."""

    def __init__(self, script):
        self.script, self.handled = script, []

    def handle(self, event):
        self.handled.append(event.at)
        return self.script.get(event.at, [])


class Memory:
    def __init__(self):
        self.entries = []

    def write(self, event, actions):
        self.entries.append((event.at, list(actions)))


DROP, ASSIGN, ABORT, ADMIT = (
    ev.DropGroup("g0"),
    ev.AssignTurn("g1.0.t0", "a", 1),
    ev.AbortTurn("g2.0.t0", "a", 1, "stalled"),
    ev.AdmitGroup(3, "g3"),
)


def test_events_that_an_action_causes_are_handled_after_the_remaining_actions():
    scheduler = Scripted({1.0: [DROP, ASSIGN], 2.0: [ABORT], 3.0: [ADMIT]})
    memory, done = Memory(), []

    def carry_out(action):
        done.append(action)
        if action == DROP:  # Dropping the group ends its turns.
            queue.feed(ev.Tick(at=2.0))
            queue.feed(ev.Tick(at=3.0))
            assert done == [DROP], "no action is carried out within another"

    queue = ActionQueue(scheduler, carry_out, memory)
    queue.feed(ev.Tick(at=1.0))
    assert done == [DROP, ASSIGN, ABORT, ADMIT] and scheduler.handled == [1.0, 2.0, 3.0]
    assert memory.entries == [(1.0, [DROP, ASSIGN]), (2.0, [ABORT]), (3.0, [ADMIT])]


def test_an_exception_of_an_action_reaches_the_caller_and_later_events_are_handled_in_order():
    scheduler = Scripted({1.0: [DROP, ASSIGN], 2.0: [ABORT], 4.0: [ADMIT]})
    done = []

    def carry_out(action):
        done.append(action)
        if action == DROP:
            queue.feed(ev.Tick(at=2.0))
            raise RuntimeError("no worker is left")

    queue = ActionQueue(scheduler, carry_out)
    with pytest.raises(RuntimeError, match="no worker is left"):
        queue.feed(ev.Tick(at=1.0))
    queue.feed(ev.Tick(at=4.0))
    assert scheduler.handled == [1.0, 2.0, 4.0] and done == [DROP, ABORT, ADMIT]


def test_a_thousand_events_that_cause_each_other_do_not_deepen_the_stack():
    scheduler = Scripted({float(at): [ADMIT] for at in range(1000)})
    done = []

    def carry_out(action):
        done.append(action)
        queue.feed(ev.Tick(at=float(len(done))))

    queue = ActionQueue(scheduler, carry_out)
    queue.feed(ev.Tick(at=0.0))
    assert len(done) == 1000
