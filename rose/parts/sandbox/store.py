"""The store of checkpoints: raw captures of sandboxes by name and turn, each chunk stored once.

    FOLDER/packs/ID              chunks of files (`packs`)
    FOLDER/turns/NAME/TURN       manifest: which chunks make which file of the capture
    FOLDER/parts/                files that are being written, locked by their writers
    FOLDER/lock                  shared lock to commit a manifest, exclusive lock to remove packs

A manifest is written last, with its own hash. It names all of its packs, so a turn needs no other
turn's manifest. Several processes on several machines may use one folder if its file system has
flock. A pack is kept while any of its chunks is used. Malicious writers can damage the store.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import itertools
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import asdict
from functools import partial
from pathlib import Path
from urllib.parse import quote, unquote

from rose.parts.sandbox.packs import BLOCK_BYTES, HASH_BYTES, Pack, PackWriter, StoreDamaged, digest
from rose.parts.sandbox.pieces import (
    ABOUT,
    IMAGE,
    LISTING,
    Index,
    Manifest,
    ManifestWriter,
    Reading,
    read_pieces,
    step,
    write_piece,
)

LOCK_S = 60.0  # seconds to wait for the lock
PAUSE_S = 0.02  # seconds between two attempts to lock
COPY_BYTES = 1 << 20  # bytes of a read when a pack is copied


class Store:
    """A folder of checkpoints. `behind`: a store from which missing turns and chunks are read.
    `sync`: a commit returns when its data is on the disk, not only in the kernel. Methods raise
    OSError if the disk fails or is full, and leave nothing half-written. They block the thread."""

    def __init__(self, folder: Path, behind: Store | None = None, sync: bool = False) -> None:
        self.folder, self.behind, self.sync = Path(folder), behind, sync
        for name in ("packs", "turns", "parts"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        # If the file system has no locks, fail now and not at the first checkpoint.
        with self._locked(fcntl.LOCK_SH):
            pass
        self._index = Index()
        self._named: dict[tuple[str, int, int], list[str]] = {}  # a manifest's file -> its packs
        self._parts = itertools.count()

    # ---------------------------------------------------------------------- writing

    def save(
        self,
        name: str,
        turn: int,
        capture: Path,
        parent: tuple[str, int] | None = None,
        keep_image: bool = False,
        life: int = 0,
    ) -> Manifest:
        """Store the raw capture in the folder `capture`. Files that its listing marks as unchanged
        (data null) get their content from the turn `parent`. `keep_image`: get the memory image
        from there, too. Raises `StoreDamaged` if `parent` lacks them."""
        try:
            return self._save(Manifest(name, turn, parent, life=life), Path(capture), keep_image)
        except _Vanished:  # packs that another process has removed
            self._index.clear()
            return self._save(Manifest(name, turn, parent, life=life), Path(capture), keep_image)

    def _save(self, made: Manifest, capture: Path, keep_image: bool) -> Manifest:
        before = self.manifest(*made.parent) if made.parent else None
        if before:
            for pack in before.packs:
                self._learn(pack)
        with self._writer() as writer:
            put = ManifestWriter(made, self._index, writer)
            listing, unchanged = self._whole_listing(capture, before)
            for path in sorted(capture.rglob("*")):
                where = path.relative_to(capture).as_posix()
                if path.is_dir():
                    made.folders.append(where)
                elif where != LISTING:
                    with path.open("rb") as file:
                        put.add_file(where, read_pieces(file, step(where)))
            put.add_file(LISTING, iter(partial(io.BytesIO(listing).read, step(LISTING)), b""))
            for where, old in unchanged.items():
                put.add_known(where, old, before)
            if made.image_turn is None and any(w.startswith(IMAGE) for w in made.files):
                made.image_turn = made.turn
            elif keep_image and before and before.image_turn is not None:
                made.image_turn = before.image_turn
                made.folders += [f for f in before.folders if f.startswith(IMAGE[:-1])]
                for where in [*(w for w in before.files if w.startswith(IMAGE)), ABOUT]:
                    put.add_known(where, where, before)
            put.finish(self.sync)
            self._copy_missing_packs(made, put.name)
            self._commit(made, put)
        return made

    def _whole_listing(self, capture: Path, before: Manifest | None) -> tuple[bytes, dict]:
        """Return the listing, with the field `data` set for every regular file. For files that the
        capture left out, also return a mapping: their `data` -> `data` in `before`."""
        raw = (capture / LISTING).read_bytes()
        entries = json.loads(raw)
        missing = [
            e for e in entries if e["kind"] == "file" and e["data"] is None and "same" not in e
        ]
        if not missing:
            return raw, {}
        if before is None:
            raise StoreDamaged(
                f"{capture}: {missing[0]['path']} has no data, and there's no parent"
            )
        old = {e["path"]: e.get("data") for e in json.loads(self._content_of(before, LISTING))}
        taken = {entry["data"] for entry in entries}
        numbers = (n for n in range(len(entries) + len(taken)) if f"data/{n}" not in taken)
        unchanged = {}
        for entry in missing:
            if not old.get(entry["path"]):
                words = f"turn {before.turn} of {before.name} has no {entry['path']}"
                raise StoreDamaged(f"{capture}: {words}, which should be unchanged since")
            entry["data"] = f"data/{next(numbers)}"
            unchanged[entry["data"]] = old[entry["path"]]
        return json.dumps(entries).encode(), unchanged

    @contextlib.contextmanager
    def _writer(self) -> Iterator[PackWriter]:
        """Context with a writer of a new part, which is removed unless it has been renamed."""
        with self._locked(fcntl.LOCK_SH):  # against `collect`, until the part is locked
            writer = PackWriter(self._new_part())
        try:
            yield writer
        finally:
            writer.close()

    def _copy_missing_packs(self, made: Manifest, new: str) -> None:
        """Copy packs that only the store `behind` has, because they may be removed there at any
        time. `new`: the manifest's new pack."""
        for pack in made.packs:
            if pack != new and self.behind is not None and not self._pack_path(pack).exists():
                try:
                    self.behind._copy_pack(pack, self, lambda n: None)
                except StoreDamaged:
                    raise _Vanished(pack) from None

    def _commit(self, made: Manifest, put: ManifestWriter) -> None:
        """Move the new pack to its place and write the manifest. Raises `_Vanished`."""
        with self._locked(fcntl.LOCK_SH):
            if put.name:
                put.writer.path.replace(self._pack_path(put.name))
            for pack in made.packs:
                if not self._pack_path(pack).exists():
                    raise _Vanished(pack)
            made.written += self._write_manifest(made)
        if put.name:
            self._index.add(put.name, put.hashes)

    def _write_manifest(self, made: Manifest) -> int:
        """Write a manifest, with the lock held. Return its size in bytes."""
        import zstandard

        path, part = self._turn_path(made.name, made.turn), self._new_part()
        body = zstandard.ZstdCompressor(level=3).compress(json.dumps(asdict(made)).encode())
        try:
            with part.open("xb") as file:
                file.write(digest(body) + body)
                file.flush()
                if self.sync:
                    os.fsync(file.fileno())
            for last in (False, True):  # repeated if `forget` has just removed the folder
                path.parent.mkdir(exist_ok=True)
                try:
                    part.replace(path)
                    break
                except FileNotFoundError:
                    if last:
                        raise
        finally:
            part.unlink(missing_ok=True)
        if self.sync:
            for folder in (path.parent, self.folder / "packs"):
                _sync_folder(folder)
        return HASH_BYTES + len(body)

    def copy(self, name: str, turn: int, to: Store, pace: Callable[[int], None]) -> int | None:
        """Store the turn in `to`, too. Call `pace(n)` before `n` bytes. Return the bytes written;
        None if `to` has the turn of a later life, which it keeps. Raises `StoreDamaged`."""
        made, written = self.manifest(name, turn), 0
        if to._has_later_life(made):
            return None
        for pack in made.packs:
            if not to._has_pack(pack):
                written += self._copy_pack(pack, to, pace)
        with to._locked(fcntl.LOCK_SH):
            gone = [pack for pack in made.packs if not to._has_pack(pack)]
            if not gone:
                written += to._write_manifest(made)
        if gone:  # packs that were removed meanwhile, because no manifest named them
            return written + (self.copy(name, turn, to, pace) or 0)
        return written

    def _has_later_life(self, made: Manifest) -> bool:
        try:
            return self.manifest(made.name, made.turn).life > made.life
        except StoreDamaged:
            return False

    def _copy_pack(self, pack: str, to: Store, pace: Callable[[int], None]) -> int:
        try:
            source = self._pack_path(pack).open("rb")
        except FileNotFoundError:
            raise StoreDamaged(f"{self._pack_path(pack)}: is gone") from None
        with source, to._writer() as writer:
            written = writer.copy(source, COPY_BYTES, pace, to.sync)
            with to._locked(fcntl.LOCK_SH):
                writer.path.replace(to._pack_path(pack))
        return written

    # ---------------------------------------------------------------------- reading

    def turns(self, name: str) -> list[int]:
        """Return the stored turns of `name`, whether or not they can be read."""
        found = set(self.behind.turns(name)) if self.behind else set()
        with contextlib.suppress(FileNotFoundError):
            found |= {int(n) for n in os.listdir(self._name_path(name)) if n.isdigit()}
        return sorted(found)

    def names(self) -> list[str]:
        return sorted(unquote(name) for name in os.listdir(self.folder / "turns"))

    def manifest(self, name: str, turn: int, life: int | None = None) -> Manifest:
        """Return a turn's manifest. Raises `StoreDamaged`, also if the turn is not stored or
        belongs to another life than `life`."""
        path = self._turn_path(name, turn)
        try:
            made = self._read_manifest(path)
            if (made.name, made.turn) != (name, turn):
                raise StoreDamaged(f"{path}: has turn {made.turn} of {made.name}")
            if life not in (None, made.life):
                raise StoreDamaged(f"turn {turn} of {name} is that of another episode of this name")
            return made
        except StoreDamaged:
            if self.behind is None:
                raise
            return self.behind.manifest(name, turn, life)

    def _read_manifest(self, path: Path) -> Manifest:
        try:
            return self._parse_manifest(path, path.read_bytes())
        except OSError as error:
            raise StoreDamaged(f"{path}: {error.strerror}") from None

    @staticmethod
    def _parse_manifest(path: Path, data: bytes) -> Manifest:
        import zstandard

        body = data[HASH_BYTES:]
        if not body or digest(body) != data[:HASH_BYTES]:
            raise StoreDamaged(f"{path}: the manifest is damaged")
        fields = json.loads(zstandard.ZstdDecompressor().decompress(body))
        fields["parent"] = tuple(fields["parent"]) if fields["parent"] else None
        return Manifest(**fields)

    def newest_life(self, name: str) -> int:
        """Return the latest life of `name` that has a stored turn, 0 if there is none."""
        found = [self.behind.newest_life(name) if self.behind else 0]
        for turn in self.turns(name):
            with contextlib.suppress(StoreDamaged):
                found.append(self._read_manifest(self._turn_path(name, turn)).life)
        return max(found)

    def has(self, name: str, turn: int, life: int) -> bool:
        """Return whether this turn of this life was stored, even if parts of it can't be read."""
        try:
            self.manifest(name, turn, life)
        except StoreDamaged:
            return False
        return True

    def load(self, name: str, turn: int, into: Path, life: int | None = None) -> Path:
        """Write the whole raw capture to the new folder `into`. Raises `StoreDamaged`, also if the
        turn is of another life than `life`."""
        into = Path(into)
        made = self.manifest(name, turn, life)
        part = into.with_name(f"{into.name}.part")
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        try:
            with Reading(self._places()) as reading:
                for where in made.folders:
                    (part / where).mkdir(parents=True, exist_ok=True)
                for where, (size, extents) in made.files.items():
                    (part / where).parent.mkdir(parents=True, exist_ok=True)
                    with (part / where).open("xb", BLOCK_BYTES) as file:
                        for piece in reading.pieces(made, extents):
                            write_piece(file, piece)
                        file.truncate(size)
            part.rename(into)
        except BaseException:
            shutil.rmtree(part, ignore_errors=True)
            raise
        return into

    def _content_of(self, made: Manifest, where: str) -> bytes:
        with Reading(self._places()) as reading:
            return b"".join(map(bytes, reading.pieces(made, made.files[where][1])))

    # ---------------------------------------------------------------------- removing

    def forget(self, name: str, keep: int = 0, upto: int | None = None) -> None:
        """Remove the manifests of `name`, except the newest `keep`. With `upto`, consider only
        turns up to `upto`. `collect` later removes the packs that are no longer used."""
        own = self._name_path(name)
        with self._locked(fcntl.LOCK_SH), contextlib.suppress(FileNotFoundError):
            numbers = sorted(int(n) for n in os.listdir(own) if n.isdigit())
            numbers = [n for n in numbers if upto is None or n <= upto]
            for turn in numbers[: max(0, len(numbers) - keep)]:
                self._turn_path(name, turn).unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # not empty
                own.rmdir()

    def collect(self) -> int:
        """Remove packs that no manifest names, and parts of dead writers. Return the bytes freed.
        Packs of a damaged manifest are removed, too. Raises OSError if a manifest can't be read."""
        with self._locked(fcntl.LOCK_EX):
            named = self._used_packs()
            freed = sum(_remove_dead(part) for part in (self.folder / "parts").iterdir())
            for pack in (self.folder / "packs").iterdir():
                if pack.name not in named:
                    freed += pack.stat().st_size
                    pack.unlink()
                    self._index.drop(pack.name)
        return freed

    def _used_packs(self) -> set[str]:
        seen: dict[tuple[str, int, int], list[str]] = {}
        for folder in (self.folder / "turns").iterdir():
            for path in folder.iterdir():
                found = path.stat()
                key = (str(path), found.st_ino, found.st_mtime_ns)
                with contextlib.suppress(StoreDamaged):
                    known = self._named.get(key)
                    seen[key] = known or self._parse_manifest(path, path.read_bytes()).packs
        self._named = seen
        return {pack for packs in seen.values() for pack in packs}

    # ---------------------------------------------------------------------- where things are

    def _name_path(self, name: str) -> Path:
        return self.folder / "turns" / quote(name, safe="").replace(".", "%2E")

    def _turn_path(self, name: str, turn: int) -> Path:
        return self._name_path(name) / f"{turn:06d}"

    def _pack_path(self, pack: str) -> Path:
        return self.folder / "packs" / pack

    def _new_part(self) -> Path:
        """Return a path that no other machine, process, thread or part has."""
        unique = f"{os.uname().nodename}-{os.getpid()}-{time.monotonic_ns()}-{next(self._parts)}"
        return self.folder / "parts" / f"{unique}-{id(self)}"

    def _has_pack(self, pack: str) -> bool:
        return self._pack_path(pack).exists() or (
            self.behind is not None and self.behind._has_pack(pack)
        )

    def _places(self) -> list[Path]:
        """Return the folders of packs, this store's first."""
        return [self.folder / "packs", *(self.behind._places() if self.behind else ())]

    def _learn(self, pack: str) -> None:
        """Index the chunks of a pack that this process did not write."""
        if pack in self._index:
            return
        for place in self._places():
            with contextlib.suppress(StoreDamaged), closing(Pack(place / pack, pack)) as old:
                self._index.add(pack, old.hashes)
                return

    @contextlib.contextmanager
    def _locked(self, kind: int) -> Iterator[None]:
        path, until = self.folder / "lock", time.monotonic() + LOCK_S
        with path.open("ab") as file:
            while True:
                try:
                    fcntl.flock(file, kind | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > until:
                        words = f"held by another process for over {LOCK_S:g} s"
                        raise OSError(errno.ETIMEDOUT, words, str(path)) from None
                    time.sleep(PAUSE_S)
                except OSError as error:
                    words = f"its file system has no flock ({error.strerror})"
                    raise OSError(error.errno, words, str(path)) from None
            yield


class _Vanished(StoreDamaged):
    """A pack was removed before the manifest that names it was committed."""


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _remove_dead(part: Path) -> int:
    """Remove a part whose writer no longer holds its lock. Return the bytes freed."""
    with contextlib.suppress(OSError), part.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        size = os.fstat(file.fileno()).st_size
        part.unlink()
        return size
    return 0
