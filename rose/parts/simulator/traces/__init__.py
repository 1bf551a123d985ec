"""Traces of online requests and of spot instances: read from a file, cut and scaled, or generated
with similar statistics.

The package imports only numpy, so that the simulator and the benchmarks replay the same requests.
The repository contains no trace.
"""

from rose.parts.simulator.traces.files import read
from rose.parts.simulator.traces.spot import Availability
from rose.parts.simulator.traces.synthetic import generate
from rose.parts.simulator.traces.trace import BLOCK, Trace, TraceError

__all__ = ["BLOCK", "Availability", "Trace", "TraceError", "generate", "read"]
