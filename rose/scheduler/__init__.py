"""The decisions, pure: events in, actions out; the live coordinator and the simulator drive the
same object.

May import `rose.config` only. Knows no clock, no MPI, no vLLM: time comes with each event, and a
decision that the journal of events can't reproduce is a bug.
"""

from rose.scheduler.core import Scheduler
from rose.scheduler.registry import build

__all__ = ["Scheduler", "build"]
