"""Files of new versions in a node's memory, for the engines of all its rollout ranks.

    <path>/v000012/from-000011/rank-00003.h5     the very file of the store, once it has this name
    <path>/refused, <path>/v000012/from-000011/refused     why nothing more comes

`<path>` is rose-<uid>-<run>-<pid>.<start> in /dev/shm, mode 0700, of the first rollout rank on the
node, which alone writes; the others look. It outlives engines; a rank that was killed leaves it,
and its launcher, or the next rank of the same run on this node, which knows the dead one by pid and
start time, removes it.

The mirror is a convenience: whatever the operating system refuses (no memory left, no folder) costs
the edge that was being written and nothing else; readers find that in the store's files
(`rose.transfer.source.Mirrored`). Its pages count as memory of the job.
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

from rose.files import own_folder

SHARED_MEMORY = Path("/dev/shm")
REFUSED = "refused"
# seconds for an edge to begin, and to be complete, after a rank received that it was published
BEGINS_S, ARRIVES_S = 0.2, 30.0


def choose_path(run_dir: Path, folder: Path | None = None) -> Path:
    """Where this process would keep its node's mirror of the run; what dead ones left is
    removed."""
    parent = folder or (SHARED_MEMORY if SHARED_MEMORY.is_dir() else Path(tempfile.gettempdir()))
    run = hashlib.blake2s(str(run_dir.resolve()).encode(), digest_size=6).hexdigest()
    prefix = f"rose-{os.getuid()}-{run}-"
    for left in parent.glob(f"{prefix}*"):
        pid, _, start = left.name.removeprefix(prefix).partition(".")
        if pid.isdecimal() and _start_time(int(pid)) != start:
            shutil.rmtree(left, ignore_errors=True)
    return parent / f"{prefix}{os.getpid()}.{_start_time(os.getpid())}"


def remove_left(run_dir: Path) -> None:
    """What dead processes of the run have left in this machine's memory."""
    choose_path(run_dir)


class Mirror:
    """`files`: how many make an edge, one per trainer rank. `limit_bytes`: a file that would take
    the mirror above it is refused; without one only the kernel says no, and where a job's memory is
    limited by a control group it ends the job instead."""

    def __init__(self, path: Path, files: int, limit_bytes: int):
        self.path, self._files, self._limit_bytes = path, files, limit_bytes

    # ----------------------------------------------------------------- the writing rank

    def open(self, name: str, nbytes: int) -> np.ndarray | None:
        """(nbytes,) uint8 of memory to fill with the file `name`, then to `finish`; null if it was
        refused. Other edges' files are removed: whoever still wants one reads the store's."""
        edge = self.path / Path(name).parent
        try:
            own_folder(self.path, parents=False)
            for other in self.path.glob("v*/*"):
                if other != edge:
                    shutil.rmtree(other)
            edge.mkdir(parents=True, exist_ok=True)
            if (edge / REFUSED).exists():
                return None
            here = sum(path.stat().st_size for path in edge.iterdir())
            if here + nbytes > self._limit_bytes:
                raise OSError(
                    f"the mirror would hold {here + nbytes} bytes; its limit is {self._limit_bytes}"
                )
            with open(self._hidden(name), "w+b") as file:
                os.posix_fallocate(file.fileno(), 0, nbytes)  # a full memory says so here
                return np.memmap(file, np.uint8, "r+", shape=(nbytes,))
        except OSError as error:
            self._refuse(edge, f"{type(error).__name__}: {error}")
            return None

    def finish(self, name: str) -> None:
        with suppress(FileNotFoundError):  # closed meanwhile
            self._hidden(name).replace(self.path / name)

    def abandon(self, why: str) -> None:
        """Record that no further file will arrive, and why."""
        self._refuse(self.path, why)

    def close(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)

    def _hidden(self, name: str) -> Path:
        path = self.path / name
        return path.with_name(f".{path.name}")

    def _refuse(self, folder: Path, why: str) -> None:
        with suppress(OSError):
            for path in list(folder.iterdir()):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            (folder / REFUSED).write_text(why, encoding="utf-8")

    # ----------------------------------------------------------------- any rank of the node

    async def wait(self, edge: str) -> str:
        """Until the edge is complete here; else why it is not: it was refused, or does not come.
        Then its files are read from the store."""
        began, folder = time.monotonic(), self.path / edge
        while len(list(folder.glob("rank-*.h5"))) < self._files:
            for refused in (folder / REFUSED, self.path / REFUSED):
                with suppress(OSError):
                    return refused.read_text(encoding="utf-8")
            patience = ARRIVES_S if folder.is_dir() else BEGINS_S
            if time.monotonic() - began > patience:
                return f"not broadcast within {patience:g} s"
            await asyncio.sleep(0.002)
        return ""


def _start_time(pid: int) -> str:
    """Clock ticks after boot at which this process began: with the pid, unique on a node. Empty
    when there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19]
    except OSError:
        return ""
