"""Measure captures of a sandbox: their time, the time of a restore with its first turn, their size.

    python scripts/sandbox/bench_capture.py [--backend namespaces] [--times 15] [--folder /dev/shm]

Prints milliseconds: the fastest, as on an idle machine, and the median. State `server` has a Python
HTTP server in the background. Left out: storing (scripts/sandbox/bench_sandbox.py).
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from rich.console import Console
from rich.table import Table

from rose.parts.sandbox import Sandbox, Spec
from rose.parts.sandbox.probe import AUTO, BACKENDS, close

WAIT_S = 60.0
FILES = "for i in $(seq 20); do echo $i > f$i; done"
SERVER = (
    'python3 -c "import http.server as h; h.test(h.SimpleHTTPRequestHandler, port=80, '
    "bind='127.0.0.1')\" >/dev/null 2>&1 & "
    "until python3 -c \"import urllib.request as u; u.urlopen('http://127.0.0.1')\" 2>/dev/null; "
    "do sleep .05; done"
)


async def once(box: Sandbox, kind: str, folder: Path) -> tuple[float, float, int]:
    """Return milliseconds of a capture and of a restore with one turn, and the capture's bytes."""
    began = time.perf_counter()
    await box.capture(kind, folder)
    captured = time.perf_counter()
    other = await Sandbox.restore(folder)
    await other.run(":", WAIT_S)
    restored = time.perf_counter()
    await other.close()
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    shutil.rmtree(folder)
    return (captured - began) * 1e3, (restored - captured) * 1e3, size


async def measure(backend: str, times: int, top: Path) -> Table:
    table = Table("state", "kind", "capture", "restore", "kB", title=f"in {top}, ms")
    for state, command in (("bash", FILES), ("server", f"{FILES}; {SERVER}")):
        box = await Sandbox.start(Spec(), backend)
        await box.run(command, WAIT_S)
        for kind in box.capture_kinds:
            found = [await once(box, kind, top / f"{i}") for i in range(times)]
            shown = [
                f"{min(each):.0f}, {statistics.median(each):.0f}"
                for each in list(zip(*found, strict=True))[:2]
            ]
            table.add_row(state, kind, *shown, f"{found[-1][2] / 1000:,.0f}")
        await box.close()
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--backend", choices=(AUTO, *BACKENDS), default=AUTO)
    parser.add_argument("--times", type=int, default=15)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="rose-bench-", dir=given.folder) as top:
        Console().print(asyncio.run(measure(given.backend, given.times, Path(top))))
    close()


if __name__ == "__main__":
    main()
