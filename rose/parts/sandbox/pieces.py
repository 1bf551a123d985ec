"""Split a capture's files into chunks in packs, and list which chunks make which file."""

from __future__ import annotations

import errno
import os
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from rose.parts.sandbox.packs import Pack, PackWriter, StoreDamaged, digest

PAGE_BYTES = 4096  # chunk size of memory images: a page
CHUNK_BYTES = 1 << 16  # chunk size of other files
INDEX_CHUNKS = 1 << 18  # most chunks in an `Index`, which then takes about 60 MB
LISTING, ABOUT, IMAGE = "listing.json", "about.json", "image/"

# Consecutive chunks of a pack: (its index in `packs`, first chunk, count); or (HOLE, 0, bytes)
Extent = tuple[int, int, int]
HOLE = -1
ZEROS = bytes(PAGE_BYTES)


@dataclass
class Manifest:
    """A stored turn. `parent`: name and turn of the capture with its unchanged files. `files`: path
    in the capture's folder -> (bytes, extents). `raw`: bytes of the capture without holes;
    `written`: bytes that it took in this store. `image_turn`: the turn in which `image/` was
    captured. `life`: a number that grows with each sandbox of this name."""

    name: str
    turn: int
    parent: tuple[str, int] | None
    image_turn: int | None = None
    packs: list[str] = field(default_factory=list)
    files: dict[str, tuple[int, list[Extent]]] = field(default_factory=dict)
    folders: list[str] = field(default_factory=list)
    raw: int = 0
    written: int = 0
    life: int = 0


class Index:
    """Known chunks: hash -> (pack, number in it). Several threads may use it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._packs: OrderedDict[str, list[bytes]] = OrderedDict()
        self._places: dict[bytes, tuple[str, int]] = {}

    def __contains__(self, pack: str) -> bool:
        return pack in self._packs

    def get(self, hashed: bytes) -> tuple[str, int] | None:
        return self._places.get(hashed)

    def add(self, pack: str, hashes: list[bytes]) -> None:
        """Add the chunks of a pack. Beyond `INDEX_CHUNKS`, drop the oldest packs."""
        with self._lock:
            self._packs[pack] = hashes
            for number, hashed in enumerate(hashes):
                self._places.setdefault(hashed, (pack, number))
            while len(self._places) > INDEX_CHUNKS and len(self._packs) > 1:
                self._drop(next(iter(self._packs)))

    def drop(self, pack: str) -> None:
        with self._lock:
            self._drop(pack)

    def clear(self) -> None:
        with self._lock:
            self._packs.clear()
            self._places.clear()

    def _drop(self, pack: str) -> None:
        for hashed in self._packs.pop(pack, ()):
            if self._places.get(hashed, ("",))[0] == pack:
                del self._places[hashed]


class ManifestWriter:
    """Adds files to the manifest `made`, and their new chunks to a new pack."""

    def __init__(self, made: Manifest, index: Index, writer: PackWriter) -> None:
        self.made, self.index, self.writer = made, index, writer
        self.name = ""  # name of the new pack, "" until it is finished
        self.hashes: list[bytes] = []
        self._new: dict[bytes, int] = {}  # hash -> number of the chunk in the new pack
        self._places: dict[str, int] = {"": 0}  # pack ("": the new one) -> its index

    def add_file(self, where: str, pieces: Iterable[bytes | int]) -> None:
        """Add the file `where` with the content `pieces` (see `read_pieces`)."""
        size, extents = 0, []
        for data in pieces:
            if isinstance(data, int):
                size += data
                extents.append((HOLE, 0, data))
                continue
            size += len(data)
            self.made.raw += len(data)
            hashed = digest(data)
            pack, number = self.index.get(hashed) or ("", self._new.get(hashed, -1))
            if number < 0:
                number = self._new[hashed] = self.writer.add(hashed, data)
                self.hashes.append(hashed)
            self._extend(extents, self._index_of(pack), number, 1)
        self.made.files[where] = (size, extents)

    def add_known(self, where: str, old: str, before: Manifest) -> None:
        """Add the file `where` with the content that `old` has in the manifest `before`."""
        size, extents = before.files[old]
        places = {i: self._index_of(pack) for i, pack in enumerate(before.packs)} | {HOLE: HOLE}
        self.made.files[where] = (size, [(places[pack], first, n) for pack, first, n in extents])

    def _index_of(self, pack: str) -> int:
        return self._places.setdefault(pack, len(self._places))

    @staticmethod
    def _extend(extents: list[Extent], pack: int, number: int, count: int) -> None:
        """Add chunks to `extents`, if possible by extending the last extent."""
        if extents and extents[-1][0] == pack and sum(extents[-1][1:]) == number:
            extents[-1] = (pack, extents[-1][1], extents[-1][2] + count)
        else:
            extents.append((pack, number, count))

    def finish(self, sync: bool) -> ManifestWriter:
        """Finish the pack, and list in the manifest which packs its files use."""
        if self.hashes:
            self.name, self.made.written = self.writer.finish(sync)
        used = sorted({e[0] for _, extents in self.made.files.values() for e in extents} - {HOLE})
        names = {place: pack or self.name for pack, place in self._places.items()}
        self.made.packs = [names[place] for place in used]
        again = {HOLE: HOLE} | {place: i for i, place in enumerate(used)}
        for where, (size, extents) in self.made.files.items():
            moved = [(again[place], first, count) for place, first, count in extents]
            self.made.files[where] = (size, moved)
        return self


class Reading:
    """Context that opens packs while a turn is read. Each pack is read from the first folder of
    `places` in which it is undamaged."""

    def __init__(self, places: list[Path]) -> None:
        self._places = places
        self._open: dict[Path, Pack] = {}

    def __enter__(self) -> Reading:
        return self

    def __exit__(self, *_: object) -> None:
        for pack in self._open.values():
            pack.close()

    def pieces(self, made: Manifest, extents: list[Extent]) -> Iterator[bytes | int]:
        """Yield the content of the extents: data, and sizes of holes. Raises `StoreDamaged`."""
        for number, first, count in extents:
            if number == HOLE:
                yield count
                continue
            end, name = first + count, made.packs[number]
            for place in self._places:
                try:
                    for many, data in self._pack(place / name, name).read(first, end - first):
                        yield data
                        first += many
                    break
                except StoreDamaged:
                    if place is self._places[-1]:
                        raise

    def _pack(self, path: Path, name: str) -> Pack:
        if path not in self._open:
            self._open[path] = Pack(path, name)
        return self._open[path]


def step(where: str) -> int:
    """Return the chunk size for the file `where` of a capture."""
    return PAGE_BYTES if where.startswith(IMAGE) else CHUNK_BYTES


def read_pieces(file: BinaryIO, step: int) -> Iterator[bytes | int]:
    """Yield a file's content: data in steps of `step` bytes, and sizes of holes. Raises OSError."""
    fd, at = file.fileno(), 0
    size = os.fstat(fd).st_size
    while at < size:
        try:
            begin = os.lseek(fd, at, os.SEEK_DATA)
        except OSError as error:
            if error.errno != errno.ENXIO:
                raise
            yield size - at  # a hole to the end
            return
        if whole := (begin - at) // step * step:
            yield whole
        at, end = at + whole, os.lseek(fd, begin, os.SEEK_HOLE)
        while at < end:
            data = os.pread(fd, step, at)
            if not data:
                return
            yield data
            at += len(data)


def write_piece(file: BinaryIO, piece: bytes | int) -> None:
    """Write data or a hole at the position of a new `file`. Pages of zeros become holes, too."""
    if isinstance(piece, int):
        file.seek(piece, os.SEEK_CUR)
        return
    for at in range(0, len(piece), PAGE_BYTES):
        page = piece[at : at + PAGE_BYTES]
        if page == ZEROS:
            file.seek(PAGE_BYTES, os.SEEK_CUR)
        else:
            file.write(page)
