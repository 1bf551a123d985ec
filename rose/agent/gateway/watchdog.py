"""Ends what agents' programs have started when the environment host is killed.

    python -m rose.agent.gateway.watchdog NAME

waits for the end of its standard input, which only the host holds open, then kills every process
that bears the host's name in the environment that it was started with. What runs below a reaper
(reaper.py) is ended by that; this covers the rest: what a killed reaper has left, and what
`verifiers` has started. Left out: processes among these whose environment was cleared.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time

import psutil

MARK = "ROSE_HOST"  # in the environment of all that agents' programs are and start
END_S = 10.0  # for all of them to be gone: a program may go on to start others


class Watchdog:
    """Watches over this process, whose programs bear `name`. Raises OSError."""

    def __init__(self, name: str) -> None:
        argv = [sys.executable, "-m", "rose.agent.gateway.watchdog", name]
        self._process = subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True
        )

    def close(self) -> None:
        """Whatever programs are left end now."""
        self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(2 * END_S)


def end_all(name: str) -> None:
    """Kill the processes that bear `name` until there is none, for `END_S` at most."""
    until = time.monotonic() + END_S
    while (found := _bearing(name)) and time.monotonic() < until:
        for process in found:
            with contextlib.suppress(psutil.Error):
                process.kill()
        time.sleep(0.05)


def _bearing(name: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.environ().get(MARK) == name and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


if __name__ == "__main__":
    while os.read(0, 4096):
        pass
    end_all(sys.argv[1])
