"""Pack files: chunks of checkpoints' files, each stored once, compressed in blocks.

    8 bytes   magic
    blocks    zstd frames, each of several chunks
    index     per block: offset, bytes, chunks, hash; per chunk: hash, bytes
    12 bytes  offset and length of the index

A pack's name is its index's hash, and the index has the blocks' hashes. So a reader detects any
damaged byte that it needs. Hashes are SHA-256, cut to 128 bits. With the CPU's SHA instructions it
is faster than BLAKE2b. A pack never changes. Each capture writes one pack, because parallel file
systems handle few large files better than many small ones.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import struct
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import accumulate
from pathlib import Path
from typing import BinaryIO

MAGIC = b"ROSEPK1\n"
HASH_BYTES = 16
BLOCK_BYTES = 1 << 18  # uncompressed size of a block, the least that can be decompressed
LEVEL = 3  # zstd's default
END = struct.Struct("<QI")
COUNTS = struct.Struct("<II")
BLOCK = struct.Struct(f"<QII{HASH_BYTES}s")
CHUNK = struct.Struct(f"<{HASH_BYTES}sI")


class StoreDamaged(Exception):
    """A stored file is damaged or gone. The message names it."""


def digest(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()[:HASH_BYTES]


class PackWriter:
    """Writes a pack at `path` and holds a lock on it, so that other processes see whether the
    writer is alive. Every method raises OSError when the disk is full."""

    def __init__(self, path: Path) -> None:
        import zstandard

        self.path = path
        self._file = path.open("xb")
        fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self._compress = zstandard.ZstdCompressor(level=LEVEL).compress
        self._blocks: list[bytes] = []
        self._chunks: list[bytes] = []
        self._buffer: list[bytes] = []
        self._buffered = 0  # bytes in the buffer
        self._offset = self._file.write(MAGIC)

    def add(self, hashed: bytes, data: bytes) -> int:
        """Add a chunk, and return its number in this pack."""
        self._chunks.append(CHUNK.pack(hashed, len(data)))
        self._buffer.append(data)
        self._buffered += len(data)
        if self._buffered >= BLOCK_BYTES:
            self._write_block()
        return len(self._chunks) - 1

    def _write_block(self) -> None:
        if not self._buffer:
            return
        frame = self._compress(b"".join(self._buffer))
        count = len(self._buffer)
        self._blocks.append(BLOCK.pack(self._offset, len(frame), count, digest(frame)))
        self._offset += self._file.write(frame)
        self._buffer, self._buffered = [], 0

    def copy(self, source: BinaryIO, step: int, pace: Callable[[int], None], sync: bool) -> int:
        """Write a copy of the pack `source`, in steps of `step` bytes, instead of added chunks.
        Call `pace(n)` before `n` bytes are written. Return the bytes written."""
        self._file.seek(0)
        self._file.truncate()
        written = 0
        while data := source.read(step):
            pace(len(data))
            written += self._file.write(data)
        self._file.flush()
        if sync:
            os.fsync(self._file.fileno())
        return written

    def finish(self, sync: bool) -> tuple[str, int]:
        """Write the index. Return the pack's name and size. `sync`: wait for the disk."""
        self._write_block()
        counts = COUNTS.pack(len(self._blocks), len(self._chunks))
        index = b"".join((counts, *self._blocks, *self._chunks))
        self._file.write(index + END.pack(self._offset, len(index)))
        self._file.flush()
        if sync:
            os.fsync(self._file.fileno())
        return digest(index).hex(), self._offset + len(index) + END.size

    def close(self) -> None:
        """Release the lock, and remove the file unless it was renamed."""
        with suppress(OSError):
            self.path.unlink(missing_ok=True)
        with suppress(OSError):  # no room for the buffer on a full disk
            self._file.close()


class Pack:
    """A pack for reading. Methods raise `StoreDamaged`. Close it after use."""

    def __init__(self, path: Path, name: str) -> None:
        self.path = path
        try:
            self._file = path.open("rb")
        except OSError as error:
            raise StoreDamaged(f"{path}: {error.strerror}") from None
        try:
            self._read_index(name)
        except BaseException:
            self.close()
            raise
        self._last: tuple[int, bytes] = (-1, b"")

    def _read_index(self, name: str) -> None:
        size = os.fstat(self._file.fileno()).st_size
        if size < len(MAGIC) + END.size or self._read_at(0, len(MAGIC)) != MAGIC:
            raise StoreDamaged(f"{self.path}: no pack, or cut short")
        offset, length = END.unpack(self._read_at(size - END.size, END.size))
        if offset + length + END.size != size:
            raise StoreDamaged(f"{self.path}: its end is damaged")
        index = self._read_at(offset, length)
        if digest(index).hex() != name:
            raise StoreDamaged(f"{self.path}: its index is damaged")
        blocks, chunks = COUNTS.unpack_from(index)
        middle = COUNTS.size + blocks * BLOCK.size
        self._blocks = list(BLOCK.iter_unpack(index[COUNTS.size : middle]))
        found = list(CHUNK.iter_unpack(index[middle:]))
        self.hashes = [hashed for hashed, _ in found]
        self._ends = list(accumulate((size for _, size in found), initial=0))
        self._firsts = list(accumulate((block[2] for block in self._blocks), initial=0))

    def _read_at(self, offset: int, length: int) -> bytes:
        try:
            return os.pread(self._file.fileno(), length, offset)
        except OSError as error:
            if error.errno == errno.EINVAL:  # an offset from a damaged end
                return b""
            raise StoreDamaged(f"{self.path}: {error.strerror}") from None

    def _read_block(self, number: int) -> bytes:
        if self._last[0] != number:
            import zstandard

            offset, length, _, hashed = self._blocks[number]
            frame = self._read_at(offset, length)
            if digest(frame) != hashed:
                end = offset + length
                raise StoreDamaged(f"{self.path}: damaged between bytes {offset} and {end}")
            self._last = (number, zstandard.ZstdDecompressor().decompress(frame))
        return self._last[1]

    def read(self, first: int, count: int) -> Iterator[tuple[int, bytes]]:
        """Yield `count` chunks from number `first` on, in parts: (number of chunks, data)."""
        if first < 0 or first + count > len(self.hashes):
            raise StoreDamaged(f"{self.path}: has no chunks {first} to {first + count}")
        while count:
            number = bisect_right(self._firsts, first) - 1
            block, begin = self._read_block(number), self._firsts[number]
            many = min(count, self._firsts[number + 1] - first)
            zero = self._ends[begin]
            yield many, block[self._ends[first] - zero : self._ends[first + many] - zero]
            first, count = first + many, count - many

    def close(self) -> None:
        self._file.close()
