"""The folders of environment hosts on a node's disk, and the takeover of dead hosts' folders.

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
OLD_S = 86_400.0  # seconds until a dead host's folder of another run is removed


def new_folder(home: Path) -> tuple[Path, IO]:
    """Create a host's folder, and return it with its lock. Raises OSError."""
    folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=home))
    lock = (folder / "lock").open("w", encoding="utf-8")
    lock_now(lock)
    return folder, lock


def take_over(home: Path, shared: Path, say: Callable[[str], None]) -> None:
    """Remove the folders of hosts that have ended. If a folder belongs to the run whose store is
    `shared`, first copy its packed turns there. Folders of other runs are removed only if they have
    not changed for `OLD_S`. Raises OSError."""
    for folder in home.glob(f"{PREFIX}*"):
        # An error means that the host lives, or is just ending.
        with (
            contextlib.suppress(BlockingIOError, FileNotFoundError),
            (folder / "lock").open("a", encoding="utf-8") as file,
        ):
            lock_now(file)
            marker = folder / SHARED
            if marker.is_file() and marker.read_text(encoding="utf-8") == str(shared):
                _copy_turns(Store(folder / "store"), Store(shared), say)
            elif time.time() - _last_used(folder) < OLD_S:
                continue
            shutil.rmtree(folder, ignore_errors=True)


def _copy_turns(store: Store, to: Store, say: Callable[[str], None]) -> None:
    for name in store.names():
        for turn in store.turns(name):
            try:
                store.copy(name, turn, to, lambda n: None)
            except StoreDamaged as error:
                say(f"turn {turn} of sandbox {name}, of a host that died: {error}")


def _last_used(folder: Path) -> float:
    """Return when the host last changed something in its folder, in seconds since 1970."""
    found = [folder, folder / "raw", folder / "store/packs", folder / "store/turns"]
    return max(path.stat().st_mtime for path in found if path.exists())
