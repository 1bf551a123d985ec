"""`ActionQueue` keeps the scheduler's order of actions when carrying them out causes events."""

from types import SimpleNamespace

import pytest

from rose.scheduler import events as ev
from rose.scheduler.actions import ActionQueue


def played(script, reacts, *times):
    """Feed ticks of these times to a queue whose scheduler answers with `script[time]`. Return the
    times handled and the actions carried out, with the errors of `feed` among them."""
    handled, done = [], []

    def handle(event):
        handled.append(event.at)
        return script.get(event.at, [])

    def carry_out(action):
        done.append(action)
        reacts(action, lambda at: queue.feed(ev.Tick(at=at)))

    queue = ActionQueue(SimpleNamespace(handle=handle), carry_out)
    for at in times:
        try:
            queue.feed(ev.Tick(at=at))
        except RuntimeError as error:
            done.append(str(error))
    return handled, done


@pytest.mark.parametrize("broken", [False, True])
def test_caused_events_wait_for_the_remaining_actions_or_after_an_exception_for_the_next(broken):
    def drops(action, feed):
        if action == "drop":
            feed(2.0), feed(3.0)
            if broken:
                raise RuntimeError("no worker is left")

    script = {1.0: ["drop", "assign"], 2.0: ["abort"], 3.0: ["admit"], 4.0: ["load"]}
    handled, done = played(script, drops, 1.0, 4.0)
    then = ["no worker is left"] if broken else ["assign"]
    assert (handled, done) == ([1.0, 2.0, 3.0, 4.0], ["drop", *then, "abort", "admit", "load"])


def test_a_thousand_events_that_cause_each_other_do_not_deepen_the_stack():
    left = [float(at) for at in range(1, 1000)]
    script = dict.fromkeys([0.0, *left], ["admit"])
    assert len(played(script, lambda _, feed: left and feed(left.pop(0)), 0.0)[1]) == 1000
