"""Temporary folders that go when their process has ended, even if it was killed.

They are in the folder for temporary files. Each is named after its process, and the next process on
the machine that makes one of that kind removes those of ended processes.
"""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from pathlib import Path

from rose import processes
from rose.files import own_folder

LONGEST_SOCKET = 107  # bytes of the path of a Unix socket, Linux's limit

_own: dict[Path, int] = {}  # folder -> process id of its owner


def folder(kind: str, parent: str | None = None) -> Path:
    """Create this process's folder of a kind, for its user alone, or return the one that is there.
    It goes when the process exits. `kind` is the start of its name, `parent` a folder to use
    instead of TMPDIR. Raises OSError."""
    remove_stale(kind, parent)
    path = _parent(parent) / f"{kind}{processes.mark()}"
    own_folder(path, parents=False)
    _own[path] = os.getpid()
    return path


def of_sockets(more: int) -> str:
    """Return TMPDIR, or /tmp if a Unix socket whose path has `more` bytes after TMPDIR's would have
    a longer path than Linux allows."""
    given = tempfile.gettempdir()
    return given if len(os.fsencode(given)) + more <= LONGEST_SOCKET else "/tmp"


def prefix(kind: str) -> str:
    """Return how the names of this process's folders of a kind begin, if it has several."""
    return f"{kind}{processes.mark()}-"


def remove_stale(kind: str, parent: str | None = None) -> None:
    """Remove folders of a kind whose processes have ended. Those of other users stay."""
    for path in _parent(parent).glob(f"{kind}*"):
        if processes.has_ended(path.name.removeprefix(kind).partition("-")[0]):
            shutil.rmtree(path, ignore_errors=True)


def _parent(parent: str | None) -> Path:
    return Path(tempfile.gettempdir() if parent is None else parent)


def remove_own() -> None:
    """Remove this process's folders, for a process that ends without its exit functions."""
    for path, owner in _own.items():
        if os.getpid() == owner:  # A forked process has its parent's list.
            shutil.rmtree(path, ignore_errors=True)


atexit.register(remove_own)
