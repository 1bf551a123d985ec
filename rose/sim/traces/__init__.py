"""Traces of online serving's requests and of spot instances: read by path, cut and scaled, or made
with like statistics.

Knows numpy only, so that the simulator and the benchmarks replay the very same requests. The
project holds no trace.
"""

from rose.sim.traces.files import read
from rose.sim.traces.made import generate
from rose.sim.traces.spot import Availability
from rose.sim.traces.trace import BLOCK, Trace, TraceError

__all__ = ["BLOCK", "Availability", "Trace", "TraceError", "generate", "read"]
