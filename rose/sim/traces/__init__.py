"""Traces of online requests and of spot instances: read from a file, cut and scaled, or generated
with similar statistics.

The package imports only numpy, so that the simulator and the benchmarks replay the same requests.
The repository contains no trace.
"""

from rose.sim.traces.files import read
from rose.sim.traces.spot import Availability
from rose.sim.traces.synthetic import generate
from rose.sim.traces.trace import BLOCK, Trace, TraceError

__all__ = ["BLOCK", "Availability", "Trace", "TraceError", "generate", "read"]
