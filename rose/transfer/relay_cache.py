"""Cache whole files on a relay's disk. They survive a restart and are evicted by last use.

    <cache>/files/v000012~from-000011~rank-00000.h5@<tag>         a whole file
    <cache>/files/v000012~from-000011~rank-00000.h5@<tag>.part    its first bytes, while it is fetched

A rewritten file has another tag, and so another name here. The cache has no checksums. Readers
verify their own, and request a fresh copy of damaged bytes.
"""  # noqa: E501

from __future__ import annotations

import threading
from collections import OrderedDict
from pathlib import Path

from rose.files import lock_now, own_folder
from rose.transfer.errors import TransferError
from rose.transfer.source import Stat


class Cache:
    """Keeps at most `limit` bytes of files in `folder`, which it creates (mode 0700) and locks.
    Construction raises `TransferError` if that fails or another relay uses it. Thread-safe."""

    def __init__(self, folder: Path, limit: int):
        self.folder, self.limit, self.bytes = folder, limit, 0
        self._files = folder / "files"
        self._sizes: OrderedDict[str, int] = OrderedDict()  # files, least recently used first
        self._mutex = threading.Lock()
        try:
            own_folder(folder)
            self._lock = (folder / "lock").open("w", encoding="utf-8")
            lock_now(self._lock)
            self._files.mkdir(exist_ok=True)
            found = [(path.stat(), path) for path in self._files.iterdir()]
        except BlockingIOError:
            raise TransferError(
                f"cache {folder}: another relay uses it; give each its own --cache"
            ) from None
        except OSError as error:
            raise TransferError(
                f"cache {folder}: {error.strerror}; give another --cache"
            ) from error
        for status, path in sorted(found, key=lambda each: each[0].st_mtime):
            self._add(path.name.removesuffix(".part"), status.st_size)

    def path(self, path: str, stat: Stat) -> Path:
        """Return where a whole file is, or will be. It counts as just used."""
        name = f"{path.replace('/', '~')}@{stat.tag}"
        with self._mutex:
            if name in self._sizes:
                self._sizes.move_to_end(name)
        return self._files / name

    def make_room(self, file: Path, size: int) -> None:
        """Evict others until a file of `size` bytes has room."""
        self._add(file.name, size)

    def close(self) -> None:
        self._lock.close()

    def _add(self, name: str, size: int) -> None:
        with self._mutex:
            self.bytes += size - self._sizes.pop(name, 0)
            self._sizes[name] = size
            while self.bytes > self.limit:
                oldest, freed = self._sizes.popitem(last=False)
                self.bytes -= freed
                for suffix in ("", ".part"):
                    (self._files / f"{oldest}{suffix}").unlink(missing_ok=True)
