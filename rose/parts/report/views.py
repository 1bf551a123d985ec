"""Write the trace and the report of a run (`rose.extensions` finds this module)."""

from __future__ import annotations

import sys
import traceback
from pathlib import Path

from rose.config import Observe
from rose.parts.report import report
from rose.parts.report.trace import build_trace

PAGE = report.FILE


def write(observe: Observe, run_dir: Path) -> None:
    """Write trace and report if conf/observe asks for them. If that fails, as on a full disk, print
    why on stderr and go on, since the run's own end matters more."""
    for wanted, make in ((observe.trace, build_trace), (observe.report, report.build_report)):
        try:
            if wanted:
                make(run_dir)
        except OSError as error:
            print(f"not written: {error.filename}: {error.strerror}", file=sys.stderr, flush=True)
        except Exception:
            print(f"not written: {make.__name__}:\n{traceback.format_exc()}", file=sys.stderr)
