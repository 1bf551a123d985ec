"""What a relay keeps on disk: pieces of files, 1 MiB each, found again after a restart.

    <cache>/chunks/v000012~from-000011/rank-00000.h5@<size>-<tag>@00000007

A chunk is written under another name and renamed, so that one of this name is whole. A file written
anew has another tag, and so other chunks. Which chunks there are is kept in memory and used from
one thread, the event loop's; `read`, `write` and `erase` touch the disk and may run in others. Left
out: checksums; readers have their own, and ask for a fresh copy of what they find damaged.
"""

from __future__ import annotations

import os
from collections import Counter, OrderedDict
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from rose.files import lock_now, write_whole
from rose.transfer.errors import TransferError
from rose.transfer.source import Stat

# bytes; small enough that a reader of a slice wastes little, large enough that requests are few
CHUNK = 1 << 20


class Chunk(NamedTuple):
    path: str  # in the store
    stat: Stat
    index: int  # bytes index * CHUNK and on

    @property
    def length(self) -> int:
        return min(CHUNK, self.stat.size - self.index * CHUNK)

    @property
    def edge(self) -> str:
        return self.path.rpartition("/")[0]


class Cache:
    """At most `limit` bytes of chunks in `folder`, which is made (mode 0700) and locked. Raises
    `TransferError` if it can't be, or is another relay's."""

    def __init__(self, folder: Path, limit: int):
        self.folder, self.limit = folder, limit
        self.bytes = 0
        # both least recently used first
        self._edges: OrderedDict[str, OrderedDict[Chunk, None]] = OrderedDict()
        self._pins: Counter[Chunk] = Counter()
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            if folder.stat().st_uid != os.geteuid():
                raise TransferError(
                    f"cache {folder}: belongs to user {folder.stat().st_uid}; give another --cache"
                )
            self._lock = (folder / "lock").open("w")
            lock_now(self._lock)
            self._find()
        except BlockingIOError:
            raise TransferError(
                f"cache {folder}: another relay uses it; give each its own --cache"
            ) from None
        except OSError as error:
            raise TransferError(
                f"cache {folder}: {error.strerror}; give another --cache"
            ) from error

    def __contains__(self, chunk: Chunk) -> bool:
        return chunk in self._edges.get(chunk.edge, ())

    def pin(self, chunk: Chunk) -> None:
        """It stays, or will when it comes, until `unpin`."""
        self._pins[chunk] += 1

    def unpin(self, chunk: Chunk) -> None:
        self._pins[chunk] -= 1
        if not self._pins[chunk]:
            del self._pins[chunk]

    def used(self, chunk: Chunk) -> None:
        self._edges[chunk.edge].move_to_end(chunk)
        self._edges.move_to_end(chunk.edge)

    def add(self, chunk: Chunk) -> list[Chunk]:
        """`chunk` has been written. Returns what must be erased for it: whole folders of the store
        first, the least recently used ones, then single chunks; none that is pinned."""
        if chunk not in self:
            self._edges.setdefault(chunk.edge, OrderedDict())[chunk] = None
            self.bytes += chunk.length
        self.used(chunk)
        return self._make_room(chunk.edge)

    def drop(self, chunk: Chunk) -> None:
        """Forget it; its file may stay until it is written again."""
        chunks = self._edges.get(chunk.edge, {})
        if chunk in chunks:
            del chunks[chunk]
            self.bytes -= chunk.length
            if not chunks:
                del self._edges[chunk.edge]

    def read(self, chunk: Chunk, begin: int, end: int) -> bytes | None:
        """Bytes `begin` to `end` of the chunk; None if the disk no longer has all of it."""
        try:
            with self._file(chunk).open("rb", buffering=0) as file:
                if os.fstat(file.fileno()).st_size != chunk.length:
                    return None
                data = os.pread(file.fileno(), end - begin, begin)
        except OSError:
            return None
        return data if len(data) == end - begin else None

    def write(self, chunk: Chunk, data: bytes) -> None:
        """Raises OSError."""
        path = self._file(chunk)
        try:
            write_whole(path, data)
        except (
            FileNotFoundError
        ):  # the folder's first, or `erase` has just removed the folder's last
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, data)

    def erase(self, chunks: list[Chunk]) -> None:
        for chunk in chunks:
            self._file(chunk).unlink(missing_ok=True)
        for folder in {self._file(chunk).parent for chunk in chunks}:
            with suppress(OSError):  # not empty
                folder.rmdir()

    def close(self) -> None:
        for part in self.folder.glob("chunks/*/*.part"):
            part.unlink(missing_ok=True)
        self._lock.close()

    def _make_room(self, newest: str) -> list[Chunk]:
        dropped: list[Chunk] = []
        kept = {newest} | {chunk.edge for chunk in self._pins}
        for edge in (
            [edge for edge in self._edges if edge not in kept] if self.bytes > self.limit else []
        ):
            dropped += self._edges[edge]
            self.bytes -= sum(chunk.length for chunk in self._edges.pop(edge))
            if self.bytes <= self.limit:
                return dropped
        single, freed = [], 0
        for chunk in (
            chunk for chunks in self._edges.values() for chunk in chunks if chunk not in self._pins
        ):
            if self.bytes - freed <= self.limit:
                break
            single.append(chunk)
            freed += chunk.length
        for chunk in single:
            self.drop(chunk)
        return dropped + single

    def _file(self, chunk: Chunk) -> Path:
        edge, _, name = chunk.path.rpartition("/")
        return (
            self.folder
            / "chunks"
            / (edge.replace("/", "~") or "~")
            / f"{name}@{chunk.stat.size}-{chunk.stat.tag}@{chunk.index:08d}"
        )

    def _find(self) -> None:
        """Take over what an earlier relay left, oldest first; whatever is no whole chunk goes."""
        found: list[tuple[float, Chunk]] = []
        for path in self.folder.glob("chunks/*/*"):
            name, _, rest = path.name.partition("@")
            identity, _, index = rest.partition("@")
            size, _, tag = identity.partition("-")
            edge = path.parent.name.replace("~", "/").strip("/")
            status = path.stat()
            if size.isdigit() and index.isdigit():
                chunk = Chunk(f"{edge}/{name}" if edge else name, Stat(int(size), tag), int(index))
                if status.st_size == chunk.length:
                    found.append((status.st_mtime, chunk))
                    continue
            path.unlink()
        dropped: list[Chunk] = []
        for _, chunk in sorted(found):
            dropped += self.add(chunk)
        self.erase(dropped)
