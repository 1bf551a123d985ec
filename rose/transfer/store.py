"""Write and commit edges, each of which takes an engine from one policy version to another.
docs/format.md lists a store's files.

Every file is written under a temporary name, synced and renamed, so a reader never sees a partial
one. An edge exists once it has a manifest. The trainer calls, in this order: `create` once on rank
0; for each edge `EdgeWriter(...).add(...).finish()` on every rank and `commit` on rank 0. A hash
covers every byte that a reader uses: the manifest's by its last line, a rank file's table by the
manifest, its payloads by the table. Hashes are xxh3, which detects accidents and not attacks.
"""

from __future__ import annotations

import io
import os
import shutil
import time
from collections import deque
from pathlib import Path

import h5py
import msgspec
import numpy as np
import xxhash

from rose.files import write_whole
from rose.transfer.base import Base
from rose.transfer.blocks import Block, Tensor
from rose.transfer.errors import Corrupted, TransferError

FORMAT = 3
INITIAL = -1  # the version of the model folder's own weights
FULL = None  # the base of an edge that needs none
WRITE_BYTES = 2**24  # least bytes of payloads that are given to HDF5 at once
MANIFEST = "manifest.json"
PLAN = "plan.json"
Step = tuple[int, int | None]  # an edge: its version and base
WIDTHS = {"bfloat16": np.dtype("<u2"), "float32": np.dtype("<u4")}  # bit patterns
ENTRY = np.dtype(
    [
        ("block", "<u4"),
        ("offset", "<u8"),
        ("length", "<u8"),  # bytes of the payload, which begins at `offset` of the dataset `data`
        ("check", "<u8"),  # xxh3-64 of the payload
        ("old", "u1", 16),  # xxh3-128 of the block before, 0 if the payload needs no base
        ("new", "u1", 16),  # xxh3-128 of the block after
    ]
)


class Plan(msgspec.Struct, frozen=True, omit_defaults=True):
    """The properties that all versions of a store share. `lineage` identifies the store; version
    numbers of another lineage are other weights. With a `base` the tensors are an adapter's."""

    format: int
    lineage: str
    world: int  # trainer ranks
    tensors: list[Tensor]
    blocks: list[Block]
    base: Base | None = None

    def width(self, block: int) -> np.dtype:
        return WIDTHS[self.tensors[self.blocks[block].tensor].dtype]

    def owned(self, rank: int) -> list[int]:
        """Return the numbers of the blocks that a trainer rank writes."""
        return [number for number, block in enumerate(self.blocks) if block.owner == rank]


class RankFile(msgspec.Struct, frozen=True):
    """The offsets and sizes, in bytes, of the two datasets in a rank's file."""

    file: str
    data_offset: int
    data_size: int
    table_offset: int
    table_size: int
    table: str  # xxh3-128 of the table's bytes


class Manifest(msgspec.Struct, frozen=True):
    format: int
    lineage: str
    plan: str  # xxh3-128 of the plan's file
    version: int
    base: int | None
    files: list[RankFile]


# msgspec crashes if two threads are the first to decode a type at the same time. A decoder that is
# created here prepares the type.
for _kind in (Plan, Manifest):
    msgspec.json.Decoder(_kind)


def edge_name(version: int, base: int | None) -> str:
    """Return the path of an edge's folder within its store, with "/"."""
    origin = "full" if base is FULL else "from-initial" if base == INITIAL else f"from-{base:06d}"
    return f"v{version:06d}/{origin}"


def parse_edge(version: str, origin: str) -> Step | None:
    """Return (version, base) from the two names of an edge's folder, or None for other folders."""
    number = version.removeprefix("v")
    base = origin.removeprefix("from-")
    if not number.isdigit() or version == number:
        return None
    if origin in ("full", "from-initial"):
        return int(number), FULL if origin == "full" else INITIAL
    return (int(number), int(base)) if base.isdigit() and base != origin else None


# --------------------------------------------------------------------------- sealed JSON


def seal(value: msgspec.Struct) -> bytes:
    """Return a line of JSON, and a line with its xxh3-128."""
    line = msgspec.json.encode(value)
    return line + b"\n" + xxhash.xxh3_128_hexdigest(line).encode() + b"\n"


def unseal(data: bytes, kind: type, where: str):
    """Return the value that `seal` encoded. Raises `Corrupted`, which names `where`."""
    line, _, check = data.partition(b"\n")
    if check != xxhash.xxh3_128_hexdigest(line).encode() + b"\n":
        raise Corrupted(
            f"{where}: its last line is not the hash of its first: it is cut short or damaged"
        )
    try:
        found = msgspec.json.decode(line)
        if isinstance(found, dict) and found.get("format") != FORMAT:
            raise Corrupted(
                f"{where}: format {found.get('format')}, this program reads {FORMAT}: trainer and "
                "readers need the same version of ROSE"
            )
        return msgspec.convert(found, kind)
    except msgspec.MsgspecError as error:
        raise Corrupted(f"{where}: {error}") from None


def hash_of(sealed: bytes) -> str:
    return xxhash.xxh3_128_hexdigest(sealed)


def write_file(path: Path, data: bytes | memoryview) -> None:
    """Write a file whole or not at all, and sync it to the disk. Raises `TransferError`."""
    try:
        write_whole(path, data, sync=True)
        sync(path.parent)
    except OSError as error:
        raise TransferError(f"{path}: not written: {error}") from error


# --------------------------------------------------------------------------- writing


def create(store: Path, plan: Plan) -> None:
    """Create an empty store with this plan and remove an existing one. Rank 0 calls it before the
    first version. Raises `TransferError`."""
    try:
        (store / PLAN).unlink(missing_ok=True)  # first, so that no half removed store is opened
        shutil.rmtree(store, ignore_errors=True)
        store.mkdir(parents=True)
    except OSError as error:
        raise TransferError(f"{store}: not created: {error}") from error
    write_file(store / PLAN, seal(plan))


def _attributes(plan: Plan, version: int, base: int | None, rank: int) -> dict:
    """Return the HDF5 attributes of a rank's file."""
    text = "" if base is FULL else str(base)
    return dict(format=FORMAT, lineage=plan.lineage, version=version, base=text, rank=rank)


class EdgeWriter:
    """A trainer rank's file of an edge. The payloads stay in memory until `finish`."""

    def __init__(self, store: Path, plan: Plan, version: int, base: int | None, rank: int):
        self.path = Path(store) / edge_name(version, base) / f"rank-{rank:05d}.h5"
        self._attributes = _attributes(plan, version, base, rank)
        self._payloads: deque[np.ndarray] = deque()
        self._entries: list[tuple] = []
        self._image: memoryview | None = None
        self.nbytes = 0

    def add(self, block: int, payload: np.ndarray, old: bytes, new: bytes) -> None:
        """Add the `payload` (k,) uint8 of the plan's `block`, and the block's digests (xxh3-128)
        before and after. `old` is empty if the payload needs no base. Call it for all blocks of the
        rank, in increasing order."""
        digests = [np.frombuffer(digest or bytes(16), np.uint8) for digest in (old, new)]
        check = xxhash.xxh3_64_intdigest(payload)
        self._entries.append((block, self.nbytes, payload.size, check, *digests))
        self._payloads.append(payload)
        self.nbytes += payload.size

    def image(self) -> memoryview:
        """Return the bytes of the file; no block can be added afterwards. HDF5 writes to memory
        only: on a disk, closing a file after a failed write can crash the process."""
        if self._image is None:
            sink = io.BytesIO()
            with h5py.File(sink, "w", libver="latest") as file:
                file.attrs.update(self._attributes)
                data, at = file.create_dataset("data", (self.nbytes,), np.uint8), 0
                while self._payloads:
                    payload = self._some_payloads()
                    data[at : at + payload.size] = payload
                    at += payload.size
                file.create_dataset("blocks", data=np.array(self._entries, dtype=ENTRY))
            # getvalue() copies nothing here. getbuffer() would export the sink's memory, and Python
            # 3.13 complains on standard error if a sink is collected before its export.
            self._image = memoryview(sink.getvalue())
        return self._image

    def _some_payloads(self) -> np.ndarray:
        """Remove the next payloads and return their bytes in a row. HDF5 gets several at once,
        because a call takes as long as a copy of 100 KB."""
        some: list[np.ndarray] = []
        nbytes = 0
        while self._payloads and nbytes < WRITE_BYTES:
            some.append(self._payloads.popleft())
            nbytes += some[-1].size
        return np.concatenate(some) if len(some) > 1 else some[0]

    def finish(self) -> Path:
        """Write the file and sync it to the disk. Raises `TransferError`, after which no unfinished
        file is left."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise TransferError(f"{self.path}: not written: {error}") from error
        write_file(self.path, self.image())
        return self.path


def commit(
    store: Path, plan: Plan, version: int, base: int | None, timeout_s: float = 120.0
) -> Path:
    """Wait for the file of every rank, write the manifest and return its path. Rank 0 calls it.

    Raises `TransferError`, which names a file that is missing after `timeout_s` seconds, or one
    that belongs to another edge."""
    target = Path(store) / edge_name(version, base)
    deadline = time.monotonic() + timeout_s
    names = [f"rank-{rank:05d}.h5" for rank in range(plan.world)]
    pause = 0.005
    # List the folder and don't look up names. An NFS client asks its server when a folder is
    # opened, but remembers for up to half a minute that a name did not exist.
    while missing := sorted(set(names) - _listed(target)):
        if time.monotonic() > deadline:
            rank = names.index(missing[0])
            raise TransferError(
                f"{target / missing[0]}: trainer rank {rank} did not write it within {timeout_s:g} "
                "s"
            )
        time.sleep(pause)
        pause = min(2 * pause, 0.1)
    files = [
        _describe(target / name, _attributes(plan, version, base, rank))
        for rank, name in enumerate(names)
    ]
    manifest = Manifest(FORMAT, plan.lineage, hash_of(seal(plan)), version, base, files)
    write_file(target / MANIFEST, seal(manifest))
    sync(target.parent)
    return target / MANIFEST


def _listed(folder: Path) -> set[str]:
    try:
        return set(os.listdir(folder))
    except FileNotFoundError:  # The first rank that writes creates the folder.
        return set()


def _describe(path: Path, expected: dict) -> RankFile:
    """Return the description of a rank's file. Raises `TransferError` if it is not as expected."""
    try:
        with h5py.File(path, "r", locking=False) as file:
            found = {key: file.attrs[key] for key in expected}
            # An empty dataset has no offset.
            (data, data_size), (table, rows) = (
                (file[name].id.get_offset() or 0, file[name].size) for name in ("data", "blocks")
            )
        if found != expected:
            raise TransferError(f"{path}: is {found}, expected {expected}")
        with open(path, "rb") as raw:
            raw.seek(table)
            bytes_of_table = raw.read(rows * ENTRY.itemsize)
    except (OSError, KeyError) as error:
        raise TransferError(f"{path}: unreadable: {error}") from error
    digest = xxhash.xxh3_128_hexdigest(bytes_of_table)
    return RankFile(path.name, data, data_size, table, len(bytes_of_table), digest)


def sync(path: Path) -> None:
    """Wait until a file, or a folder's list of names, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
