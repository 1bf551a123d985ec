"""Temporary folders of a process, which are removed once it has ended, even if it was killed.

They are in TMPDIR or a given folder, and their names contain the process's mark. A process that was
killed leaves its folder. The next process on the machine that makes a folder of the same kind
removes it.
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
    """Return this process's folder of a kind, created if absent, for its user alone. It is removed
    when the process exits. `kind` is the start of its name, `parent` a folder to use instead of
    TMPDIR. Raises OSError."""
    remove_stale(kind, parent)
    path = _parent(parent) / f"{kind}{processes.mark()}"
    own_folder(path, parents=False)
    _own[path] = os.getpid()
    return path


def of_sockets(more: int) -> str:
    """Return a parent folder for Unix sockets: TMPDIR, or /tmp if the socket's path would be longer
    than Linux allows. `more`: length in bytes of its path within the folder."""
    given = tempfile.gettempdir()
    return given if len(os.fsencode(given)) + more <= LONGEST_SOCKET else "/tmp"


def prefix(kind: str) -> str:
    """Return the common start of the names of this process's folders of a kind, if it makes
    several itself. `remove_stale` removes them once the process has ended."""
    return f"{kind}{processes.mark()}-"


def remove_stale(kind: str, parent: str | None = None) -> None:
    """Remove this user's folders of a kind whose processes have ended."""
    for path in _parent(parent).glob(f"{kind}*"):
        if processes.has_ended(path.name.removeprefix(kind).partition("-")[0]):
            shutil.rmtree(path, ignore_errors=True)


def _parent(parent: str | None) -> Path:
    return Path(tempfile.gettempdir() if parent is None else parent)


def remove_own() -> None:
    """Remove this process's folders. Runs at exit; a process that skips exit functions calls it."""
    for path, owner in _own.items():
        if os.getpid() == owner:  # A forked process has inherited its parent's entries.
            shutil.rmtree(path, ignore_errors=True)


atexit.register(remove_own)
