"""A rollout rank's copy of the edges broadcast to it, in its node's memory, for its engine's
processes to read.

    <path>/v000012/from-000011/rank-00003.payload   grows as frames come
                               rank-00003.table
                               complete             made last, empty

`<path>` is rose-<uid>-<run>-<attempt>-<rank>-<pid>.<start> in /dev/shm, or in another folder that
is given, mode 0700. Trust an edge only when it has `complete`: then every trainer rank's stream has
ended. The folder outlives engines; a rank that was killed leaves it, and the next rank of the same
run on this node, which knows the dead one by pid and start time, removes it.

The mirror is a convenience: whatever the operating system refuses (no memory left, no folder) costs
the edge that was being written and nothing else; readers find that in the files of the store. Its
pages count as memory of the job.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

SHARED_MEMORY = Path("/dev/shm")
COMPLETE = "complete"


@dataclass
class _Edge:
    folder: Path
    ended: int = 0  # streams
    nbytes: int = 0
    files: dict[tuple[int, str], BinaryIO] = field(default_factory=dict)  # by root and kind, open


class Mirror:
    """A `Sink` of `Broadcast.receive`. `roots`: trainer ranks that send a stream of every edge.
    `limit_bytes`: an edge that would take the mirror above it is dropped; without one only the
    kernel says no, and where a job's memory is limited by a control group it ends the job instead.

    `failures` tells why edges were dropped, by name.
    """

    def __init__(
        self,
        run_dir: Path,
        attempt: int,
        rank: int,
        roots: int,
        folder: Path | None = None,
        limit_bytes: int | None = None,
    ) -> None:
        self.failures: dict[str, str] = {}
        self._roots, self._limit_bytes = roots, limit_bytes
        self._edges: dict[str, _Edge] = {}
        self._names: dict[int, str] = {}  # of the stream that each root has open
        parent = folder or (
            SHARED_MEMORY if SHARED_MEMORY.is_dir() else Path(tempfile.gettempdir())
        )
        run = hashlib.blake2s(str(run_dir.resolve()).encode(), digest_size=6).hexdigest()
        prefix = f"rose-{os.getuid()}-{run}-"
        self.path = parent / f"{prefix}{attempt}-{rank}-{os.getpid()}.{_start_time(os.getpid())}"
        for left in parent.glob(f"{prefix}*"):
            pid, _, start = left.name.rpartition("-")[2].partition(".")
            if _start_time(int(pid)) != start:
                shutil.rmtree(left, ignore_errors=True)
        with suppress(OSError):  # then every edge will say so
            self.path.mkdir(mode=0o700)

    # ----------------------------------------------------------------- a sink

    def begin(self, root: int, name: str) -> None:
        self._names[root] = name
        if name in self.failures:
            return
        try:
            edge = self._edges.get(name)
            if edge is None:
                edge = self._edges[name] = _Edge(self.path / name)
                if not self.path.is_dir():
                    raise FileNotFoundError(f"{self.path} could not be made")
                edge.folder.mkdir(parents=True)
            for kind in ("payload", "table"):
                path = edge.folder / f"rank-{root:05d}.{kind}"
                edge.files[root, kind] = path.open("xb", buffering=0)
        except OSError as error:
            self._fail(name, error)

    def payload(self, root: int, data: memoryview) -> None:
        self._write(root, "payload", data)

    def table(self, root: int, data: memoryview) -> None:
        self._write(root, "table", data)

    def end(self, root: int) -> None:
        name = self._names.pop(root)
        edge = self._edges.get(name)
        if edge is None:
            return
        for kind in ("payload", "table"):
            edge.files.pop((root, kind)).close()
        edge.ended += 1
        if edge.ended == self._roots:
            try:
                partial = edge.folder / f".{COMPLETE}"
                partial.touch()
                partial.replace(edge.folder / COMPLETE)
            except OSError as error:
                self._fail(name, error)

    def _write(self, root: int, kind: str, data: memoryview) -> None:
        edge = self._edges.get(self._names[root])
        if edge is None:
            return
        try:
            edge.nbytes += len(data)
            if self._limit_bytes is not None and self.nbytes > self._limit_bytes:
                raise OSError(
                    f"the mirror would hold {self.nbytes} bytes; its limit is {self._limit_bytes}"
                )
            while data:
                # memory that is nearly full takes a part
                data = data[edge.files[root, kind].write(data) :]
        except OSError as error:
            self._fail(self._names[root], error)

    def _fail(self, name: str, error: OSError) -> None:
        self.failures[name] = f"{type(error).__name__}: {error}"
        self._drop(name)

    def _drop(self, name: str) -> None:
        edge = self._edges.pop(name)
        for file in edge.files.values():
            file.close()
        with suppress(OSError):  # what can't be removed now goes with the whole
            (edge.folder / COMPLETE).unlink(missing_ok=True)  # first: nobody trusts half an edge
            shutil.rmtree(edge.folder)
            if edge.folder.parent != self.path:
                edge.folder.parent.rmdir()  # refused while there are other edges of that version

    # ----------------------------------------------------------------- its owner

    @property
    def nbytes(self) -> int:
        """Bytes of all edges, those still coming among them."""
        return sum(edge.nbytes for edge in self._edges.values())

    def find(self, name: str) -> Path | None:
        """The folder of the edge `name`, if it is complete."""
        edge = self._edges.get(name)
        return edge.folder if edge is not None and edge.ended == self._roots else None

    def is_arriving(self, name: str) -> bool:
        """Whether the edge `name` has begun to arrive, and is not complete."""
        return name in self._edges and self.find(name) is None

    def keep(self, names: Collection[str]) -> None:
        """Drop the complete edges that are not in `names`, and forget why others failed. Readers
        that have a file open keep what they read."""
        for name, edge in list(self._edges.items()):
            if name not in names and edge.ended == self._roots:
                self._drop(name)
        open_now = set(self._names.values())
        self.failures = {
            name: why for name, why in self.failures.items() if name in names or name in open_now
        }

    def close(self) -> None:
        """Remove everything."""
        for name in list(self._edges):
            self._drop(name)
        shutil.rmtree(self.path, ignore_errors=True)


def _start_time(pid: int) -> str:
    """Clock ticks after boot at which this process began: with the pid, unique on a node. Empty
    when there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""
