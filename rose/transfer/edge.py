"""Read one edge of a store, or of the copy of it that a rollout rank keeps in memory
(`rose.transfer.mirror`)."""

from __future__ import annotations

import io
from collections.abc import Sequence

import h5py
import numpy as np
import xxhash

from rose.transfer.errors import Corrupted
from rose.transfer.source import Refused, Source
from rose.transfer.store import (
    ENTRY,
    FORMAT,
    MANIFEST,
    PLAN,
    Manifest,
    Plan,
    edge_name,
    hash_of,
    unseal,
)

JOIN = 64 * 1024  # bytes between two payloads that are read over rather than asked for apart
COMPLETE = "complete"  # file of a mirrored edge, written last


def read_plan(source: Source) -> tuple[Plan, str]:
    """The store's plan and its hash, which every manifest repeats. Raises `Missing`,
    `Corrupted`."""
    data = source.read(PLAN)
    return unseal(data, Plan, f"{source}/{PLAN}"), hash_of(data)


class Edge:
    """`tables[rank]` is loaded, and verified, at first use. Thread-safe once it is."""

    def __init__(self, source: Source, version: int, base: int | None, plan: Plan):
        self.source, self.version, self.base, self.plan = source, version, base, plan
        self.name = edge_name(version, base)
        self._tables: dict[int, np.ndarray] = {}

    @property
    def nbytes(self) -> int:
        raise NotImplementedError

    def table(self, rank: int) -> np.ndarray:
        """(entries,) of dtype `ENTRY`, by increasing block: what this rank's file holds."""
        if rank not in self._tables:
            self._tables[rank] = self._checked(rank, self._read_table(rank))
        return self._tables[rank]

    def payloads(self, rank: int, blocks: Sequence[int]) -> dict[int, tuple[np.void, memoryview]]:
        """(entry, payload) of those of `blocks`, all of owner `rank`, that this edge changes. Each
        payload's hash is checked; bytes that fail are asked for once more, past all caches. Raises
        `Missing`, `Corrupted`."""
        table = self.table(rank)
        rows = np.searchsorted(table["block"], np.array(blocks, np.uint32))
        rows = [
            r
            for r, b in zip(rows.tolist(), blocks, strict=False)
            if r < len(table) and table["block"][r] == b
        ]
        found: dict[int, tuple[np.void, memoryview]] = {}
        for span in _spans(table, rows):
            low, high = (
                int(table["offset"][span[0]]),
                int(table["offset"][span[-1]] + table["length"][span[-1]]),
            )
            data, fresh = memoryview(self._read(rank, low, high - low, False)), False
            for row in span:
                entry = table[row]
                begin = int(entry["offset"]) - low
                while True:
                    payload = data[begin : begin + int(entry["length"])]
                    if xxhash.xxh3_64_intdigest(payload) == entry["check"]:
                        break
                    if fresh:
                        raise Corrupted(
                            f"{self.source}/{self.name}: rank {rank}'s file: the payload of block "
                            f"{entry['block']} is damaged"
                        )
                    data, fresh = memoryview(self._read(rank, low, high - low, True)), True
                found[int(entry["block"])] = (entry, payload)
        return found

    def _read_table(self, rank: int) -> np.ndarray:
        raise NotImplementedError

    def _read(self, rank: int, offset: int, length: int, fresh: bool) -> bytes:
        raise NotImplementedError

    def _checked(self, rank: int, table: np.ndarray) -> np.ndarray:
        """The payloads must tile the data, and the blocks be this rank's: no later step looks
        again."""
        where = f"{self.source}/{self.name}: rank {rank}'s table"
        blocks, ends = table["block"].astype(np.int64), table["offset"] + table["length"]
        if len(table) and not ((np.diff(blocks) > 0).all() and blocks[-1] < len(self.plan.blocks)):
            raise Corrupted(f"{where}: its blocks are not in order, or not in the plan")
        if any(self.plan.blocks[b].owner != rank for b in blocks.tolist()):
            raise Corrupted(f"{where}: a block of another rank")
        if (table["offset"] != np.concatenate([[0], ends[:-1]])[: len(table)]).any() or (
            int(ends[-1]) if len(table) else 0
        ) != self._data_size(rank):
            raise Corrupted(f"{where}: its payloads don't cover the data")
        return table

    def _data_size(self, rank: int) -> int:
        raise NotImplementedError


class StoredEdge(Edge):
    """Of a store. Raises `Missing` when it is not committed, `Corrupted` when its manifest is not
    this store's."""

    def __init__(self, source: Source, version: int, base: int | None, plan: Plan, plan_hash: str):
        super().__init__(source, version, base, plan)
        where = f"{self.name}/{MANIFEST}"
        self.manifest: Manifest = unseal(source.read(where), Manifest, f"{source}/{where}")
        found = (
            self.manifest.lineage,
            self.manifest.plan,
            self.manifest.version,
            self.manifest.base,
        )
        if (
            found != (plan.lineage, plan_hash, version, base)
            or len(self.manifest.files) != plan.world
        ):
            raise Corrupted(
                f"{source}/{where}: (lineage, plan, version, base) is {found}, expected "
                f"{(plan.lineage, plan_hash, version, base)}, with {plan.world} files"
            )

    @property
    def nbytes(self) -> int:
        return self.manifest.nbytes

    def _read_table(self, rank: int) -> np.ndarray:
        file = self.manifest.files[rank]
        path = f"{self.name}/{file.file}"
        end = file.data_offset + file.data_size
        for fresh in (False, True):
            head = self._range(rank, 0, file.data_offset, fresh)
            tail = self._range(rank, end, file.size - end, fresh)
            if xxhash.xxh3_128_hexdigest(head + tail) == file.rest:
                break
        else:
            raise Corrupted(
                f"{self.source}/{path}: its HDF5 structure is damaged, or the file is cut short"
            )
        try:
            with h5py.File(_Holed(head, file.data_size, tail), "r") as parsed:
                table = parsed["blocks"][()]
                if parsed.attrs["format"] != FORMAT or table.dtype != ENTRY:
                    raise Corrupted(f"{self.source}/{path}: not of format {FORMAT}")
                return table
        except (OSError, KeyError, RuntimeError) as error:
            raise Corrupted(f"{self.source}/{path}: unreadable: {error}") from error

    def _read(self, rank: int, offset: int, length: int, fresh: bool) -> bytes:
        return self._range(rank, self.manifest.files[rank].data_offset + offset, length, fresh)

    def _range(self, rank: int, offset: int, length: int, fresh: bool) -> bytes:
        try:
            return self.source.read(
                f"{self.name}/{self.manifest.files[rank].file}", offset, length, fresh
            )
        except (
            Refused
        ) as error:  # the manifest is right, so the file is shorter than it was, or no file
            raise Corrupted(f"not what its manifest describes: {error}") from error

    def _data_size(self, rank: int) -> int:
        return self.manifest.files[rank].data_size


class MirroredEdge(Edge):
    """Of a mirror: the same payloads and tables as they were broadcast. Raises `Missing` unless it
    is complete."""

    def __init__(self, source: Source, version: int, base: int | None, plan: Plan):
        super().__init__(source, version, base, plan)
        source.read(f"{self.name}/{COMPLETE}")

    @property
    def nbytes(self) -> int:
        return 0  # here already

    def _read_table(self, rank: int) -> np.ndarray:
        path = f"{self.name}/rank-{rank:05d}.table"
        return unpack_table(self.source.read(path), f"{self.source}/{path}")

    def _read(self, rank: int, offset: int, length: int, fresh: bool) -> bytes:
        return self.source.read(f"{self.name}/rank-{rank:05d}.payload", offset, length, fresh)

    def _data_size(self, rank: int) -> int:
        return self.source.size(f"{self.name}/rank-{rank:05d}.payload") or 0


def pack_table(table: np.ndarray) -> bytes:
    """As it is broadcast: its bytes, and their xxh3-128."""
    data = table.tobytes()
    return data + xxhash.xxh3_128_digest(data)


def unpack_table(data: bytes, where: str) -> np.ndarray:
    if (
        xxhash.xxh3_128_digest(data[:-16]) != data[-16:]
        or len(data) % ENTRY.itemsize != 16 % ENTRY.itemsize
    ):
        raise Corrupted(f"{where}: the table is damaged")
    return np.frombuffer(data[:-16], ENTRY)


def _spans(table: np.ndarray, rows: list[int]) -> list[list[int]]:
    """Rows whose payloads are read at once."""
    spans: list[list[int]] = []
    end = None
    for row in rows:
        begin = int(table["offset"][row])
        if end is None or begin - end > JOIN:
            spans.append([])
        spans[-1].append(row)
        end = begin + int(table["length"][row])
    return spans


class _Holed(io.RawIOBase):
    """A file whose middle is not there and reads as zeros: HDF5's structure needs none of it."""

    def __init__(self, head: bytes, hole: int, tail: bytes):
        self._head, self._hole, self._tail, self._at = head, hole, tail, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = offset + (0, self._at, len(self._head) + self._hole + len(self._tail))[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer) -> int:
        size = len(self._head) + self._hole + len(self._tail)
        wanted = max(0, min(len(buffer), size - self._at))
        out = memoryview(buffer).cast("B")
        for start, part in ((0, self._head), (len(self._head) + self._hole, self._tail)):
            low, high = max(self._at, start), min(self._at + wanted, start + len(part))
            if low < high:
                out[low - self._at : high - self._at] = part[low - start : high - start]
        self._at += wanted
        return wanted
