"""What is made of a run's files once an attempt has ended: the trace and the report.

Left out: their contents (trace.py, report.py) and what is shown while the run goes on (terminal.py,
TensorBoard).
"""

from __future__ import annotations

import sys
from pathlib import Path

from rose.config import Observe
from rose.observe.report import build_report
from rose.observe.trace import build_trace


def build(observe: Observe, run_dir: Path) -> None:
    """Those that conf/observe asks for. One that finds no room is named on stderr: how the run
    ended matters more."""
    for wanted, make in ((observe.trace, build_trace), (observe.report, build_report)):
        try:
            if wanted:
                make(run_dir)
        except OSError as error:
            print(f"not written: {error.filename}: {error.strerror}", file=sys.stderr, flush=True)
