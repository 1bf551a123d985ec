"""Keep the files of new versions in a node's memory, for the engines of all its rollout ranks.

    <path>/v000012/from-000011/rank-00003.h5     a file of the store, complete once it has this name
    <path>/refused, <path>/v000012/from-000011/refused     the reason why no further file arrives

`<path>` is rose-<uid>-<run>-<mark of a process> in /dev/shm, mode 0700. The first rollout rank on
the node owns it and is the only one that writes; the other ranks read. The mirror outlives engines.
If its owner is killed, the launcher removes the mirror, or the next rank of the same run on this
node does. The mark (rose/processes.py) shows that the owner is dead.

The mirror is optional. If the operating system refuses anything (no memory left, no folder), only
the edge being written is lost. Readers find it in the store's files
(`rose.transfer.source.Mirrored`). The mirror's pages count as memory of the job.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import shutil
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import numpy as np

from rose import processes, scratch
from rose.files import own_folder

SHARED_MEMORY = Path("/dev/shm")
REFUSED = "refused"
# After a rank learned of a new version, seconds until its edge must begin to arrive, and until it
# must be complete. Otherwise the rank reads the store's files.
BEGINS_S, ARRIVES_S = 0.2, 30.0


def choose_path(run_dir: Path, folder: Path | None = None) -> Path:
    """Return the path of this process's mirror of the run; remove mirrors of dead processes."""
    parent = folder or (SHARED_MEMORY if SHARED_MEMORY.is_dir() else Path(tempfile.gettempdir()))
    run = hashlib.blake2s(str(run_dir.resolve()).encode(), digest_size=6).hexdigest()
    prefix = f"rose-{os.getuid()}-{run}-"
    scratch.remove_stale(prefix, str(parent))
    return parent / f"{prefix}{processes.mark()}"


def remove_left(run_dir: Path) -> None:
    """Remove the mirrors that dead processes of the run have left in this machine's memory."""
    choose_path(run_dir)


class Mirror:
    """A node's mirror. An edge has `files` files, one per trainer rank. A file that would take the
    mirror above `limit_bytes` is refused. Otherwise the mirror could exceed a control group's
    limit, and the kernel would kill the job."""

    def __init__(self, path: Path, files: int, limit_bytes: int):
        self.path, self._files, self._limit_bytes = path, files, limit_bytes

    # ----------------------------------------------------------------- the writing rank

    def open(self, name: str, nbytes: int) -> np.ndarray | None:
        """Return memory (nbytes,) uint8 for the file `name`, to be filled before `finish`, or None
        if it was refused. Other edges' files are removed; their readers use the store's files."""
        edge = self.path / Path(name).parent
        try:
            own_folder(self.path, parents=False)
            for other in self.path.glob("v*/*"):
                if other != edge:
                    shutil.rmtree(other)
                    with suppress(OSError):  # The version has other edges.
                        other.parent.rmdir()
            edge.mkdir(parents=True, exist_ok=True)
            if (edge / REFUSED).exists():
                return None
            here = sum(path.stat().st_size for path in edge.iterdir())
            if here + nbytes > self._limit_bytes:
                raise OSError(
                    f"the mirror would hold {here + nbytes} bytes; its limit is {self._limit_bytes}"
                )
            with open(self._temporary(name), "w+b") as file:
                os.posix_fallocate(file.fileno(), 0, nbytes)  # raises if the memory is full
                return np.memmap(file, np.uint8, "r+", shape=(nbytes,))
        except OSError as error:
            self._refuse(edge, f"{type(error).__name__}: {error}")
            return None

    def finish(self, name: str) -> None:
        """Give the filled file its name, by which readers find it."""
        with suppress(FileNotFoundError):  # The mirror has been closed.
            self._temporary(name).replace(self.path / name)

    def abandon(self, why: str) -> None:
        """Record that no further file will arrive, and why."""
        self._refuse(self.path, why)

    def close(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)

    def _temporary(self, name: str) -> Path:
        path = self.path / name
        return path.with_name(f".{path.name}")

    def _refuse(self, folder: Path, why: str) -> None:
        """Replace the files of a folder by the reason why no further file arrives."""
        with suppress(OSError):
            for path in list(folder.iterdir()):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            (folder / REFUSED).write_text(why, encoding="utf-8")

    # ----------------------------------------------------------------- any rank of the node

    async def wait(self, edge: str) -> str:
        """Wait until the edge is complete in the mirror. Return "", or the reason if it was refused
        or is late; then its files must be read from the store."""
        began, folder = time.monotonic(), self.path / edge
        while _count(folder) < self._files:
            for refused in (folder / REFUSED, self.path / REFUSED):
                with suppress(OSError):
                    return refused.read_text(encoding="utf-8")
            patience = ARRIVES_S if folder.is_dir() else BEGINS_S
            if time.monotonic() - began > patience:
                return f"not broadcast within {patience:g} s"
            await asyncio.sleep(0.002)
        return ""


def _count(folder: Path) -> int:
    """Return how many ranks' files a folder has, which another process may be removing."""
    with suppress(OSError):
        return sum(name.startswith("rank-") and name.endswith(".h5") for name in os.listdir(folder))
    return 0
