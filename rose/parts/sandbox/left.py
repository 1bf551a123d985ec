"""The folders of environment hosts on a node's disk, and the takeover of those of dead hosts.

    HOME/host-*/lock      held by the host as long as it lives
    HOME/host-*/shared    the path of its run's shared store
    HOME/host-*/store     the turns that it has packed (`store`)

Callers hold HOME's lock.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

from rose.files import lock_now
from rose.parts.sandbox.packs import StoreDamaged
from rose.parts.sandbox.store import Store

SHARED = "shared"
PREFIX = "host-"
OLD_S = 86_400.0  # seconds after which a dead host's folder of another run is removed


def new_folder(home: Path) -> tuple[Path, IO]:
    """Create a host's folder, and return it with its lock. Raises OSError."""
    folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=home))
    lock = (folder / "lock").open("w", encoding="utf-8")
    lock_now(lock)
    return folder, lock


def take_over(home: Path, shared: Path, say: Callable[[str], None]) -> None:
    """Remove the folders of hosts that have ended. If they belong to the run whose store is
    `shared`, first store there what they had packed. Folders of other runs are removed when they
    are old. Raises OSError."""
    for folder in home.glob(f"{PREFIX}*"):
        with (
            contextlib.suppress(
                BlockingIOError, FileNotFoundError
            ),  # The host lives, or is ending.
            (folder / "lock").open("a", encoding="utf-8") as file,
        ):
            lock_now(file)
            marker = folder / SHARED
            if marker.is_file() and marker.read_text(encoding="utf-8") == str(shared):
                _rescue(Store(folder / "store"), Store(shared), say)
            elif time.time() - _used(folder) < OLD_S:
                continue
            shutil.rmtree(folder, ignore_errors=True)


def _rescue(store: Store, to: Store, say: Callable[[str], None]) -> None:
    for name in store.names():
        for turn in store.turns(name):
            try:
                store.copy(name, turn, to, lambda n: None)
            except StoreDamaged as error:
                say(f"turn {turn} of sandbox {name}, of a host that died: {error}")


def _used(folder: Path) -> float:
    """Return when the host last changed something in its folder, in seconds since 1970."""
    found = [folder, folder / "raw", folder / "store/packs", folder / "store/turns"]
    return max(path.stat().st_mtime for path in found if path.exists())
