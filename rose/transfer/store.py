"""Write, commit, read and drop policy versions.

    <folder>/v000012/rank-00003.h5    one per trainer rank, complete once it has this name
    <folder>/v000012/manifest.json    written last: the version exists when this file does

Every file is written under a temporary name, synced and renamed, so a reader never sees half of one.
Order for the trainer: rank 0 `prepare`, barrier, every rank `VersionWriter(...).add(...).finish()`,
rank 0 `commit`. A tensor stands whole in exactly one rank's file. Splitting tensors into blocks and
differencing against `base_version` belong to a later codec; the fields for them are here.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import h5py
import msgspec
import numpy as np

from rose.transfer.codec import CODECS, Streams, digest
from rose.transfer.errors import TransferError

FORMAT = 1
DTYPES = {"float32": np.dtype("<f4"), "bfloat16": np.dtype("<u2")}  # bf16 travels as its bit pattern
INDEX = "index"  # dataset of a rank file: JSON of `RankIndex`


class TensorEntry(msgspec.Struct, frozen=True):
    """One tensor of a rank file; `nbytes` and `xxh3` are of the decoded tensor."""

    name: str
    shape: list[int]
    dtype: str
    nbytes: int
    xxh3: str
    encoding: str


class RankIndex(msgspec.Struct, frozen=True):
    format: int
    version: int
    rank: int
    world: int
    base_version: int | None
    tensors: list[TensorEntry]


class FileEntry(msgspec.Struct, frozen=True):
    file: str
    size: int  # bytes on disk
    tensors: list[TensorEntry]


class Manifest(msgspec.Struct, frozen=True):
    format: int
    version: int
    base_version: int | None  # null: full
    dtype: str  # of the tensors; "mixed" if they differ
    files: list[FileEntry]


def version_folder(folder: str | Path, version: int) -> Path:
    return Path(folder) / f"v{version:06d}"


def prepare(folder: str | Path, version: int) -> None:
    """Rank 0, before any rank writes: drop what an interrupted or superseded run left of this version."""
    target = version_folder(folder, version)
    (target / "manifest.json").unlink(missing_ok=True)
    if target.exists():
        shutil.rmtree(target)
    target.mkdir(parents=True)


class VersionWriter:
    """One trainer rank's file of one version.

    Raises `TransferError` on a tensor that can't be stored and when the disk is full; the unfinished
    file is removed then.
    """

    def __init__(self, folder: str | Path, version: int, rank: int, world: int, base_version: int | None = None):
        self.path = version_folder(folder, version) / f"rank-{rank:05d}.h5"
        self._partial = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        self._header = dict(format=FORMAT, version=version, rank=rank, world=world, base_version=base_version)
        self._entries: list[TensorEntry] = []
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = h5py.File(self._partial, "w", libver="latest")

    def add(self, name: str, tensor, dtype: str | None = None, encoding: str = "dense") -> VersionWriter:
        """Torch tensor (any device) or ndarray, float32 or bfloat16 (ndarray: uint16 with `dtype="bfloat16"`)."""
        array, dtype = _as_array(name, tensor, dtype)
        try:
            for stream, data in CODECS[encoding].encode(array, None).items():
                self._file.create_dataset(f"tensors/{name}/{stream}", data=data)
        except (OSError, RuntimeError, ValueError) as error:
            self._discard()
            raise TransferError(f"{self.path}: tensor {name!r} not written: {error}") from error
        self._entries.append(TensorEntry(name, list(array.shape), dtype, array.nbytes, digest(array), encoding))
        return self

    def finish(self) -> Path:
        """Sync to disk and give the file its name."""
        index = msgspec.json.encode(RankIndex(**self._header, tensors=self._entries))
        try:
            self._file.create_dataset(INDEX, data=np.frombuffer(index, dtype=np.uint8))
            self._file.close()
            sync(self._partial)
            os.replace(self._partial, self.path)
            sync(self.path.parent)
        except (OSError, RuntimeError, ValueError) as error:
            self._discard()
            raise TransferError(f"{self.path}: not written: {error}") from error
        return self.path

    def _discard(self) -> None:
        try:
            self._file.close()
        except (OSError, RuntimeError):  # HDF5 can't flush what the disk has no room for; the file goes anyway
            pass
        self._partial.unlink(missing_ok=True)


def commit(folder: str | Path, version: int, world: int, base_version: int | None = None,
           timeout_s: float = 120.0) -> Path:
    """Rank 0: wait for all `world` rank files, write the manifest, return its path.

    Raises `TransferError` naming the file still missing after `timeout_s` seconds, a file of another
    version, or a tensor that two ranks wrote.
    """
    target = version_folder(folder, version)
    deadline = time.monotonic() + timeout_s
    files, owner = [], {}
    for rank in range(world):
        path = target / f"rank-{rank:05d}.h5"
        while not path.exists():
            if time.monotonic() > deadline:
                raise TransferError(f"{path}: trainer rank {rank} did not write it within {timeout_s:g} s")
            time.sleep(0.01)
        index = _read_index(path)
        expected = (FORMAT, version, rank, world, base_version)
        found = (index.format, index.version, index.rank, index.world, index.base_version)
        if found != expected:
            raise TransferError(f"{path}: (format, version, rank, world, base_version) is {found}, expected {expected}")
        for entry in index.tensors:
            if owner.setdefault(entry.name, path.name) != path.name:
                raise TransferError(f"{path}: tensor {entry.name!r} is also in {owner[entry.name]}")
        files.append(FileEntry(path.name, path.stat().st_size, index.tensors))
    dtypes = {entry.dtype for file in files for entry in file.tensors}
    manifest = Manifest(FORMAT, version, base_version, dtypes.pop() if len(dtypes) == 1 else "mixed", files)
    return _write_manifest(target / "manifest.json", manifest)


def _write_manifest(path: Path, manifest: Manifest) -> Path:
    partial = path.with_name(".manifest.json.partial")
    try:
        partial.write_bytes(msgspec.json.format(msgspec.json.encode(manifest), indent=1))
        sync(partial)
        os.replace(partial, path)
        sync(path.parent)
        sync(path.parent.parent)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise TransferError(f"{path}: not committed: {error}") from error
    return path


class Version:
    """A committed version, read tensor by tensor; every read is checked against the manifest's hash."""

    def __init__(self, path: Path, manifest: Manifest):
        self.path = path
        self.manifest = manifest
        self.version = manifest.version
        self.entries = {entry.name: entry for file in manifest.files for entry in file.tensors}
        self._where = {entry.name: path.parent / file.file for file in manifest.files for entry in file.tensors}
        self._open: dict[Path, h5py.File] = {}

    @property
    def names(self) -> list[str]:
        return list(self.entries)

    @property
    def nbytes(self) -> int:
        return sum(entry.nbytes for entry in self.entries.values())

    def read(self, name: str) -> np.ndarray:
        """Tensor `name`: float32, or uint16 bit patterns where `entries[name].dtype` is bfloat16.

        Raises `TransferError` naming file and tensor, with the expected and the found hash.
        """
        if name not in self.entries:
            raise TransferError(f"{self.path}: no tensor {name!r} in version {self.version}")
        entry, path = self.entries[name], self._where[name]
        try:
            group = self._file(path)[f"tensors/{name}"]
            streams: Streams = {stream: group[stream][()] for stream in group}
            array = CODECS[entry.encoding].decode(streams, tuple(entry.shape), DTYPES[entry.dtype], None)
        except (OSError, KeyError, ValueError, RuntimeError) as error:
            raise TransferError(f"{path}: tensor {name!r} unreadable: {error}") from error
        found = digest(array)
        if found != entry.xxh3:
            raise TransferError(f"{path}: tensor {name!r} is corrupted: xxh3-128 {found}, "
                                f"the manifest says {entry.xxh3}")
        return array

    def tensors(self) -> Iterator[tuple[str, np.ndarray]]:
        """All tensors, one in memory at a time."""
        return ((name, self.read(name)) for name in self.entries)

    def close(self) -> None:
        for file in self._open.values():
            file.close()
        self._open.clear()

    def __enter__(self) -> Version:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def _file(self, path: Path) -> h5py.File:
        if path not in self._open:
            self._open[path] = h5py.File(path, "r", locking=False)
        return self._open[path]


def open_version(manifest: str | Path) -> Version:
    """Open the committed version of this manifest. Raises `TransferError` if it is absent, unreadable, of
    another format, or if one of its files is missing or not of the size that was committed."""
    path = Path(manifest)
    try:
        parsed = msgspec.json.decode(path.read_bytes(), type=Manifest)
    except (OSError, msgspec.DecodeError) as error:
        raise TransferError(f"{path}: no readable manifest: {error}") from error
    if parsed.format != FORMAT:
        raise TransferError(f"{path}: format {parsed.format}, this program reads {FORMAT}")
    for file in parsed.files:
        target = path.parent / file.file
        size = target.stat().st_size if target.is_file() else None
        if size != file.size or "/" in file.file:
            raise TransferError(f"{target}: {'missing' if size is None else f'{size} bytes'}, "
                                f"the manifest says {file.size} bytes")
        for entry in file.tensors:
            if entry.dtype not in DTYPES or entry.encoding not in CODECS:
                raise TransferError(f"{path}: tensor {entry.name!r} has dtype {entry.dtype!r} and encoding "
                                    f"{entry.encoding!r}; known are {sorted(DTYPES)} and {sorted(CODECS)}")
    return Version(path, parsed)


def collect_garbage(folder: str | Path, keep: int) -> list[int]:
    """Delete all but the newest `keep` committed versions and the bases these need, and what an interrupted
    writer left below the newest of them. Returns the versions deleted."""
    present = {int(path.name[1:]): path for path in Path(folder).glob("v[0-9]*") if path.name[1:].isdigit()}
    committed = sorted(v for v, path in present.items() if (path / "manifest.json").is_file())
    if not committed:
        return []
    needed = set(committed[-keep:])
    for version in committed[-keep:]:
        base = _base_of(present[version])
        while base is not None and base not in needed and base in present:
            needed.add(base)
            base = _base_of(present[base])
    dead = sorted(v for v in present if v not in needed and v < committed[-1])
    for version in dead:
        (present[version] / "manifest.json").unlink(missing_ok=True)  # first: nobody opens a half-deleted version
        shutil.rmtree(present[version])
    return dead


def _base_of(folder: Path) -> int | None:
    return json.loads((folder / "manifest.json").read_text())["base_version"]


def _read_index(path: Path) -> RankIndex:
    try:
        with h5py.File(path, "r", locking=False) as file:
            return msgspec.json.decode(file[INDEX][()].tobytes(), type=RankIndex)
    except (OSError, KeyError, msgspec.DecodeError) as error:
        raise TransferError(f"{path}: unreadable: {error}") from error


def _as_array(name: str, tensor, dtype: str | None) -> tuple[np.ndarray, str]:
    """Contiguous little-endian array in the bits to keep, and its dtype string."""
    if hasattr(tensor, "detach"):  # torch is imported only for its tensors: a reader of versions doesn't need it
        dtype = str(tensor.dtype).removeprefix("torch.")
        tensor = tensor.detach().cpu().contiguous()
        if dtype == "bfloat16":
            import torch

            tensor = tensor.view(torch.uint16)
        array = tensor.numpy()
    else:
        array = np.ascontiguousarray(tensor)
        dtype = dtype or str(array.dtype)
    if dtype not in DTYPES or array.dtype != DTYPES[dtype]:
        raise TransferError(f"tensor {name!r} is {dtype} ({array.dtype}); versions hold {sorted(DTYPES)}")
    return array, dtype


def sync(path: Path) -> None:
    """Until this file, or this folder's list of names, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
