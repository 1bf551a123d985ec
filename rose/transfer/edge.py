"""Read an edge of a store: the files that lead from one version to another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import xxhash

from rose.transfer.errors import Corrupted
from rose.transfer.source import Refused, Source
from rose.transfer.store import (
    ENTRY,
    MANIFEST,
    PLAN,
    Manifest,
    Plan,
    Step,
    edge_name,
    hash_of,
    parse_edge,
    unseal,
)

# A table's rows with the hashes as bytes, as `Entry` has them.
_AS_BYTES: np.dtype = np.dtype(
    [(name, "V16" if name in ("old", "new") else ENTRY[name]) for name in ENTRY.fields or ()]
)
MAX_GAP = 64 * 1024  # most unneeded bytes between two payloads that one read may include


class Entry(NamedTuple):
    """A row of a rank's table, of dtype `ENTRY`."""

    block: int
    offset: int
    length: int
    check: int
    old: bytes
    new: bytes


def read_plan(source: Source) -> tuple[Plan, str]:
    """Return the store's plan and its hash, which every manifest repeats. Raises `Missing` or
    `Corrupted`."""
    data = source.read(PLAN)
    return unseal(data, Plan, f"{source}/{PLAN}"), hash_of(data)


def list_edges(source: Source, version: int | None = None) -> set[Step]:
    """Return the edges, of one version or of all, that have a folder. Some may be uncommitted."""
    folders = source.names("") if version is None else [f"v{version:06d}"]
    found = {parse_edge(f, o) for f in folders if f.startswith("v") for o in source.names(f)}
    return found - {None}


class Edge:
    """A committed edge of a store. A rank's table is read and verified at first use. Construction
    raises `Missing` if there is no manifest, `Corrupted` if it is of another store. Thread-safe."""

    def __init__(self, source: Source, version: int, base: int | None, plan: Plan, plan_hash: str):
        self.source, self.version, self.base, self.plan = source, version, base, plan
        self.name = edge_name(version, base)
        self._tables: dict[int, np.ndarray] = {}
        where = f"{source}/{self.name}/{MANIFEST}"
        found: Manifest = unseal(source.read(f"{self.name}/{MANIFEST}"), Manifest, where)
        there = found.lineage, found.plan, found.version, found.base
        expected = plan.lineage, plan_hash, version, base
        if there != expected or len(found.files) != plan.world:
            raise Corrupted(
                f"{where}: (lineage, plan, version, base) is {there}, expected {expected}, with "
                f"{plan.world} files"
            )
        self.files = found.files
        self.nbytes = sum(file.data_size for file in found.files)

    def table(self, rank: int) -> np.ndarray:
        """Return the table (blocks of this rank,) of dtype `ENTRY`, by increasing block."""
        if rank not in self._tables:
            table, where = self._read_table(rank), f"{self._file(rank)}: its table"
            blocks, owners = table["block"].astype(np.int64), self.plan.blocks
            if (np.diff(blocks, append=len(owners)) <= 0).any() or any(
                owners[block].owner != rank for block in blocks.tolist()
            ):
                raise Corrupted(
                    f"{where} has not the blocks that the plan gives this rank, in order"
                )
            lengths, nbytes = table["length"], self.files[rank].data_size
            if (table["offset"] != lengths.cumsum() - lengths).any() or lengths.sum() != nbytes:
                raise Corrupted(f"{where}'s payloads don't cover the data")
            self._tables[rank] = table
        return self._tables[rank]

    def payloads(self, rank: int, blocks: Sequence[int]) -> dict[int, tuple[Entry, memoryview]]:
        """Return the (entry, payload) of each of `blocks`, which are ascending and owned by `rank`.
        Each payload's hash is checked. Damaged bytes are read once more without caches. Raises
        `Missing` or `Corrupted`."""
        table = self.table(rank)
        found: dict[int, tuple[Entry, memoryview]] = {}
        at = np.searchsorted(table["block"], blocks)
        if len(table) and (table["block"][at.clip(max=len(table) - 1)] == blocks).all():
            for entries in _spans(table[at]):
                found |= self._read_span(rank, entries)
        if len(found) != len(blocks):
            raise Corrupted(f"{self._file(rank)}: its table lacks a block")
        return found

    def _read_span(self, rank: int, entries: np.ndarray) -> dict[int, tuple[Entry, memoryview]]:
        """Read the payloads of neighbouring entries at once, and check their hashes."""
        low, end = int(entries[0]["offset"]), int(entries[-1]["offset"] + entries[-1]["length"])
        at = self.files[rank].data_offset + low
        for fresh in (False, True):
            data, found, damaged = memoryview(self._read(rank, at, end - low, fresh)), {}, None
            for fields in entries.view(_AS_BYTES).tolist():
                entry = Entry(*fields)
                payload = data[entry.offset - low : entry.offset - low + entry.length]
                found[entry.block] = entry, payload
                if xxhash.xxh3_64_intdigest(payload) != entry.check:
                    damaged = entry.block
            if damaged is None:
                return found
        raise Corrupted(f"{self._file(rank)}: the payload of block {damaged} is damaged")

    def _file(self, rank: int) -> str:
        """Return the path of a rank's file for error messages."""
        return f"{self.source}/{self.name}/rank-{rank:05d}.h5"

    def require(self) -> None:
        """Raise `Missing` if the edge has been removed. Its files stay for some time after that."""
        self.source.read(f"{self.name}/{MANIFEST}")

    def _read_table(self, rank: int) -> np.ndarray:
        file = self.files[rank]
        for fresh in (False, True):
            data = self._read(rank, file.table_offset, file.table_size, fresh)
            if xxhash.xxh3_128_hexdigest(data) == file.table:
                return np.frombuffer(data, ENTRY)
        raise Corrupted(f"{self.source}/{self.name}/{file.file}: its table is damaged")

    def _read(self, rank: int, offset: int, length: int, fresh: bool) -> bytes:
        try:
            return self.source.read(f"{self.name}/{self.files[rank].file}", offset, length, fresh)
        except Refused as error:  # The manifest is right, so the file is cut short, or no file.
            raise Corrupted(f"not what its manifest describes: {error}") from error


def _spans(entries: np.ndarray) -> list[np.ndarray]:
    """Split entries into runs of neighbours whose payloads one read fetches."""
    gaps = entries["offset"][1:] - (entries["offset"] + entries["length"])[:-1]
    return np.split(entries, np.flatnonzero(gaps > MAX_GAP) + 1) if len(entries) else []
