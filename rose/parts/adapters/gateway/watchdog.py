"""End the processes of agents' programs when the environment host is killed.

    python -m rose.parts.adapters.gateway.watchdog NAME

The watchdog waits for the end of its standard input, which only the host holds open. Then it kills
every process that was started with the host's name in its environment variables. Usually a reaper
(reaper.py) has ended a program's processes before. The watchdog ends processes that a killed reaper
has left, and processes of `verifiers`. It can't find processes that were started without them.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time

import psutil

MARK = "ROSE_HOST"  # environment variable with the host's name, in all processes of programs
END_S = 10.0  # most seconds of killing, because a program may still start processes


class Watchdog:
    """The watchdog of this host, whose programs have `name` as `MARK`. Raises OSError."""

    def __init__(self, name: str) -> None:
        argv = [sys.executable, "-m", "rose.parts.adapters.gateway.watchdog", name]
        self._process = subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True
        )

    def close(self) -> None:
        """Have the watchdog kill the remaining programs, and wait until it ends."""
        self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(2 * END_S)


def end_all(name: str) -> None:
    """Kill the processes with `name` in `MARK` until none is left, for at most `END_S`."""
    until = time.monotonic() + END_S
    while (found := _marked(name)) and time.monotonic() < until:
        for process in found:
            with contextlib.suppress(psutil.Error):
                process.kill()
        time.sleep(0.05)


def _marked(name: str) -> list[psutil.Process]:
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
