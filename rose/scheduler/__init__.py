"""The decisions, pure: events in, actions out; the live coordinator and the simulator drive the
same object. No paper is in here: what a system decides is in `rose.policies`.

Knows no clock, no MPI, no vLLM: time comes with each event, and a decision that the journal of
events can't reproduce is a bug.
"""

from rose.scheduler.core import Scheduler

__all__ = ["Scheduler"]
