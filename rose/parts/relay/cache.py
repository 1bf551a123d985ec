"""Cache chunks of files on a relay's disk. They survive a restart and are evicted by last use.

    <cache>/chunks/v000012~from-000011~rank-00000.h5@<tag>@000007

A chunk is written under a temporary name and renamed, so that a chunk of this name is whole. A
rewritten file has another tag, and so other chunks. The cache has no checksums: readers verify the
hashes of versions, and request a fresh copy of damaged bytes.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from pathlib import Path
from typing import NamedTuple

from rose.files import lock_now, own_folder, write_whole
from rose.transfer.errors import TransferError
from rose.transfer.source import Stat

# Bytes of a chunk: few enough that a read of a small range wastes little, and enough that requests
# are few.
CHUNK = 1 << 20


class Chunk(NamedTuple):
    path: str  # path in the store
    stat: Stat
    index: int  # number of the chunk, which begins at byte index * CHUNK

    @property
    def length(self) -> int:
        return min(CHUNK, self.stat.size - self.index * CHUNK)

    @property
    def name(self) -> str:
        return f"{self.path.replace('/', '~')}@{self.stat.tag}@{self.index:06d}"


class Cache:
    """Keeps at most `limit` bytes of chunks in `folder`, which it creates (mode 0700) and locks.
    Raises `TransferError` if the folder can't be used, or another relay uses it. Thread-safe."""

    def __init__(self, folder: Path, limit: int):
        self.folder, self.limit, self.bytes = folder, limit, 0
        self._chunks = folder / "chunks"
        self._sizes: OrderedDict[str, int] = OrderedDict()  # chunks, least recently used first
        self._mutex = threading.Lock()
        try:
            own_folder(folder)
            self._lock = (folder / "lock").open("w", encoding="utf-8")
            lock_now(self._lock)
            self._chunks.mkdir(exist_ok=True)
            self._restore()
        except BlockingIOError:
            raise TransferError(
                f"cache {folder}: another relay uses it; give each its own --cache"
            ) from None
        except OSError as error:
            raise TransferError(
                f"cache {folder}: {error.strerror}; give another --cache"
            ) from error

    def read(self, chunk: Chunk) -> bytes | None:
        """Return a chunk's bytes, or None if it is not cached or incomplete on the disk."""
        with self._mutex:
            if chunk.name not in self._sizes:
                return None
            self._sizes.move_to_end(chunk.name)
        try:
            data = (self._chunks / chunk.name).read_bytes()
        except OSError:
            return None
        return data if len(data) == chunk.length else None

    def write(self, chunk: Chunk, data: bytes) -> None:
        """Keep a chunk; evict the least recently used above the limit. Raises `OSError`."""
        if not self.limit:
            return
        write_whole(self._chunks / chunk.name, data)
        self._add_and_evict(chunk.name, len(data))

    def close(self) -> None:
        for part in self._chunks.glob("*.part"):
            part.unlink(missing_ok=True)
        self._lock.close()

    def _add_and_evict(self, name: str, size: int) -> None:
        with self._mutex:
            self.bytes += size - self._sizes.pop(name, 0)
            self._sizes[name] = size
            while self.bytes > self.limit:
                oldest, freed = self._sizes.popitem(last=False)
                self.bytes -= freed
                (self._chunks / oldest).unlink(missing_ok=True)

    def _restore(self) -> None:
        """Adopt an earlier relay's chunks, oldest first, and remove files that are no chunks."""
        found = [(path.stat(), path) for path in self._chunks.iterdir()]
        for status, path in sorted(found, key=lambda each: each[0].st_mtime):
            if path.suffix == ".part" or path.name.count("@") != 2:
                path.unlink()
            else:
                self._add_and_evict(path.name, status.st_size)
