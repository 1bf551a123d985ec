"""Pure scheduler core: events in, actions out. The live coordinator and the simulator drive the
same class. The decisions of papers and other systems are in `rose.policies`.

The scheduler uses no clock, no MPI and no vLLM; each event carries its time. A decision that a
replay of the event journal doesn't reproduce is a bug.
"""

from rose.scheduler.core import Scheduler

__all__ = ["Scheduler"]
