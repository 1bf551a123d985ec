"""A lock file that several processes wait for, and that the kernel frees when its holder dies.

Imports nothing of ROSE. Left out: file systems without flock; the callers' files are in the user's
cache.
"""

from __future__ import annotations

import fcntl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PAUSE_S = 0.2


@contextmanager
def held(path: Path, deadline_s: float) -> Iterator[None]:
    """Hold `path`'s lock, the file made if absent. Raises `TimeoutError` naming it after
    `deadline_s` seconds."""
    until = time.monotonic() + deadline_s
    with path.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > until:
                    raise TimeoutError(
                        f"{path}: held by another process for over {deadline_s:.0f} s"
                    ) from None
                time.sleep(PAUSE_S)
        yield
