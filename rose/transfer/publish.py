"""Publish versions from a trainer rank: encode its shard's differences, write and remove edges.

A rank publishes its own blocks and needs no other rank's values. The differences come from one of
two sources:
1. If `Updates` know what has changed since the last version, no copy of that version is kept.
2. Otherwise each rank keeps a copy of its blocks' last published patterns (model bytes / ranks).

Engines wait for `publish`. While they roll out, `tidy` writes full versions and removes old edges.
"""

from __future__ import annotations

import functools
import shutil
import time
import uuid
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec
import numpy as np

from rose.transfer import codec
from rose.transfer.base import xxh3
from rose.transfer.blocks import Block, size
from rose.transfer.edge import Edge, list_edges, read_plan
from rose.transfer.errors import TransferError
from rose.transfer.source import Folder
from rose.transfer.store import (
    FULL,
    INITIAL,
    MANIFEST,
    EdgeWriter,
    Plan,
    Step,
    commit,
    create,
    edge_name,
)
from rose.transfer.versions import write_hashes

BATCH = 16  # blocks that a thread encodes at a time
Moves = tuple[np.ndarray, np.ndarray]  # ascending positions (c,) and differences (c,)
Part = tuple[np.ndarray, bytes, bytes]  # a block's payload in an edge, its digests before and after


class Peers(Protocol):
    """The collectives of the trainer ranks that publishing needs."""

    rank: int
    world: int

    def barrier(self) -> None: ...

    def sum(self, value: int) -> int: ...


class Updates(Protocol):
    """Knows which of this rank's values the optimizer's updates have changed, and by how much
    (rose/trainer/updates.py)."""

    known: bool  # true if every change since the last `restart` is known

    def restart(self) -> None:
        """Forget all changes. From now on, changes are counted from the current values."""

    def changes(self, number: int) -> Moves:
        """Return a block's changes."""

    def digests(self, numbers: Iterable[int]) -> dict[int, bytes]:
        """Return the xxh3-128 of each block. Called when all values are final."""


class Published(NamedTuple):
    version: int
    nbytes: int  # bytes of all ranks' payloads in the edge from the previous version
    encode_s: float
    write_s: float


class Publisher:
    """A trainer rank's publisher. Construction is collective, and rank 0 creates the store.

    `read(block)` returns the block's current values (n,), uint16 or uint32 patterns that must not
    change until they are published. Readers start from the values read during construction, or from
    zeros if the plan is an adapter's. If `updates` is given, versions from the second on are
    encoded from the changes that `updates(plan)` knows."""

    def __init__(
        self,
        store: Path,
        plan: Plan,
        peers: Peers,
        read: Callable[[Block], np.ndarray],
        threads: int,
        full_every: int,
        keep: int,
        timeout_s: float,
        updates: Callable[[Plan], Updates] | None = None,
    ):
        self.store, self.peers = Path(store), peers
        self._read, self._threads, self._timeout_s = read, threads, timeout_s
        self._full_every, self._keep = full_every, keep
        self._mine = plan.owned(peers.rank)
        self._version = INITIAL
        self._full: int | None = None  # the last full version
        self._chain: list[Step] = []  # edges from the model folder's weights to the last version
        self._lacks_initial = False  # True if the full version has no edge from these weights
        self._full_bytes, self._since_full = 0, 0
        if peers.rank == 0:
            create(self.store, msgspec.structs.replace(plan, lineage=uuid.uuid4().hex))
        peers.barrier()
        self.plan, _ = read_plan(Folder(self.store))  # `plan` with rank 0's lineage
        if msgspec.structs.replace(self.plan, lineage=plan.lineage) != plan:
            raise TransferError(
                f"{self.store}: trainer rank {peers.rank} would cut the model in another way than "
                "rank 0, or has another base model"
            )
        self._begun: int | None = None  # the version that is being encoded
        self._pool: ThreadPoolExecutor | None = None  # encodes that version
        # The parts of each batch of blocks. A part's new digest may be b"" until the version is
        # written.
        self._encoding: Iterable[list[Part]] = ()
        self._updates = None if updates is None else updates(self.plan)
        # The last published (patterns, digest) of each block. Patterns are None once `_updates`
        # know what changes.
        self._previous: dict[int, tuple[np.ndarray | None, bytes]]
        with ThreadPoolExecutor(threads, "encode") as pool:
            first = self._zero_block if plan.base else self._read_block
            self._previous = dict(zip(self._mine, pool.map(first, self._mine), strict=True))

    def begin(self, version: int) -> None:
        """Begin to encode `version`. This rank's values must be final; its peers' need not be."""
        if version <= self._version or self._begun is not None:
            last = self._version if self._begun is None else self._begun
            raise ValueError(f"version {version} after {last}: versions grow, one at a time")
        self._begun, self._pool = version, ThreadPoolExecutor(self._threads, "encode")
        part: Callable[[int], Part] = self._encoded
        if self._updates is not None and self._updates.known:
            part = functools.partial(self._encoded_changes, self._updates.changes)
        batches = [self._mine[low : low + BATCH] for low in range(0, len(self._mine), BATCH)]
        self._encoding = self._pool.map(lambda batch: [part(block) for block in batch], batches)

    def publish(
        self, version: int, send: Callable[[str, memoryview], None] | None = None
    ) -> Published:
        """Write the weights as `version`, which is committed when this returns on rank 0.
        `send(name, data)` begins to broadcast this rank's file of the edge from the last version.

        Raises `TransferError`, after which this object can't be used. Raises `ValueError` if the
        version is not above the last one, or not the one that was begun."""
        if self._begun is None:
            self.begin(version)
        elif self._begun != version:
            raise ValueError(f"version {version}, and {self._begun} was begun")
        start, base = time.perf_counter(), self._version
        writer = EdgeWriter(self.store, self.plan, version, base, self.peers.rank)
        parts = [part for made in self._encoding for part in made]
        self._pool.shutdown()
        if self._updates is not None and self._updates.known:
            found = self._updates.digests(self._mine)
            self._previous = {number: (None, found[number]) for number in self._mine}
        for number, (payload, old, new) in zip(self._mine, parts, strict=True):
            writer.add(number, payload, old, new or self._previous[number][1])
        if send is not None:
            send(f"{edge_name(version, base)}/{writer.path.name}", writer.image())
        encoded = time.perf_counter()
        writer.finish()
        if self.peers.rank == 0:
            commit(self.store, self.plan, version, base, self._timeout_s)
        nbytes = self.peers.sum(writer.nbytes)
        self._begun, self._encoding, self._version = None, (), version
        self._chain.append((version, base))
        self._since_full += nbytes
        written = time.perf_counter() - encoded
        if self._full is None:  # Engines need a full version; `tidy` writes later ones.
            self.write_full()
        if self._updates is not None:
            self._updates.restart()
            self._drop_values()
        return Published(version, nbytes, encoded - start, written)

    def write_hashes(self, folder: Path) -> None:
        """Write the hashes of the last published version, which a checkpoint keeps. Raises
        `TransferError`."""
        digests = {block: digest for block, (_, digest) in self._previous.items()}
        write_hashes(folder, self.peers.rank, self.plan, self._version, digests)

    def full_due(self) -> bool:
        """True if no full version exists, if the last one is `full_every` versions old, or if it is
        not larger than the deltas since then."""
        return (
            self._full is None
            or self._version - self._full >= self._full_every
            or self._since_full >= self._full_bytes
        )

    def _read_block(self, number: int) -> tuple[np.ndarray, bytes]:
        return _with_digest(np.array(self._read(self.plan.blocks[number])))

    def _zero_block(self, number: int) -> tuple[np.ndarray, bytes]:
        block = self.plan.blocks[number]
        count = size(block, self.plan.tensors[block.tensor].columns)
        return _with_digest(np.zeros(count, self.plan.width(number)))

    def _encoded(self, number: int) -> Part:
        """Encode a block, also an unchanged one, so that readers check that they have it."""
        previous, old = self._previous[number]
        values, new = _with_digest(self._read(self.plan.blocks[number]))
        payload = codec.encode(values, previous)
        # Overwrite the copy in place, because new memory takes longer than the writing.
        np.copyto(previous, values)
        self._previous[number] = previous, new
        return payload, old, new

    def _encoded_changes(self, changes: Callable[[int], Moves], number: int) -> Part:
        """Encode a block from the changes that updates made. Its new digest is still missing."""
        block = self.plan.blocks[number]
        values = size(block, self.plan.tensors[block.tensor].columns)
        (positions, differences), width = changes(number), self.plan.width(number).itemsize
        payload = codec.encode_moves(
            values, width, positions, differences, lambda: self._read(block)
        )
        return payload, self._previous[number][1], b""

    def _drop_values(self) -> None:
        self._previous = {n: (None, digest) for n, (_, digest) in self._previous.items()}

    # ----------------------------------------------------------------- while engines roll out

    def copy_values(self) -> None:
        """Copy the last version's values to the host, if they are known only from the weights. Call
        it before the weights change by something else than an update. Also call it before they
        leave the device, if `tidy` will then write a full version (`full_due`)."""
        if self._updates is None or not self._updates.known:
            return

        def last(changes: Callable[[int], Moves], number: int) -> tuple[np.ndarray, bytes]:
            values = np.array(self._read(self.plan.blocks[number]))
            codec.move(values, *changes(number), sign=-1)
            return values, self._previous[number][1]

        with ThreadPoolExecutor(self._threads, "encode") as pool:
            found = pool.map(functools.partial(last, self._updates.changes), self._mine)
            self._previous = dict(zip(self._mine, found, strict=True))

    def tidy(self) -> list[Step]:
        """Write a full version if one is due. On rank 0, also remove old edges, and return the
        removed ones. Failures are printed, and only make late readers slower."""
        if self.full_due():
            self.write_full()
        elif self._lacks_initial and self._version - self._full < self._keep:
            self._write_initial()  # The edges that it is composed of still exist.
        removed: list[Step] = []
        if self.peers.rank == 0:
            self._succeeds(lambda: removed.extend(collect(self.store, self._keep)))
        return removed

    def write_full(self) -> None:
        """Write the last version again in two ways: in full, without a base, and as an edge from
        the model folder's weights, which a joining reader commonly has on its own disk."""

        def whole(block: int) -> Part:
            values, digest = self._previous[block]
            if values is None:
                values = self._read(self.plan.blocks[block])
            return codec.encode(values, None), b"", digest

        nbytes = self._write_edge(FULL, lambda: whole)
        if nbytes is None:
            return
        self._full, self._full_bytes, self._since_full = self._version, nbytes, 0
        self._write_initial()
        if self._updates is not None and self._updates.known:
            self._drop_values()

    def _write_initial(self) -> None:
        """Write the edge from the model folder's weights to the last version."""
        steps = self._chain
        # A chain of one edge already leads from these weights to the version.
        done = len(steps) == 1
        done = done or self._write_edge(INITIAL, lambda: self._composed(steps)) is not None
        self._lacks_initial = not done
        if done:
            self._chain = [(self._version, INITIAL)]

    def _composed(self, steps: list[Step]) -> Callable[[int], Part]:
        """Return a function that composes a block's payloads in this rank's files of `steps`. Both
        raise `TransferError`, and the function `ValueError` for a malformed payload."""
        source = Folder(self.store)
        plan = read_plan(source)
        edges = [Edge(source, *step, *plan) for step in steps]

        def composed(block: int) -> Part:
            parts = [edge.payloads(self.peers.rank, [block])[block] for edge in edges]
            payloads = (np.frombuffer(payload, np.uint8) for _, payload in parts)
            old, new = parts[0][0].old, parts[-1][0].new
            return functools.reduce(codec.compose, payloads), old, new

        return composed

    def _write_edge(
        self, base: int | None, source: Callable[[], Callable[[int], Part]]
    ) -> int | None:
        """Write and commit an edge from `base` to the last version. `source()` returns the function
        that makes a block's part. Return all ranks' payload bytes, or None if any rank failed."""
        writer = EdgeWriter(self.store, self.plan, self._version, base, self.peers.rank)

        def write() -> None:
            part = source()
            with ThreadPoolExecutor(self._threads, "encode") as pool:
                for block, made in zip(self._mine, pool.map(part, self._mine), strict=True):
                    writer.add(block, *made)
            writer.finish()

        def committed() -> None:
            if self.peers.rank == 0:
                commit(self.store, self.plan, self._version, base, self._timeout_s)

        def removed() -> None:  # `collect` would mistake them for an edge that is being written.
            if self.peers.rank == 0:
                _remove(writer.path.parent)

        if self._succeeds_on_all(write) and self._succeeds_on_all(committed):
            return self.peers.sum(writer.nbytes)
        self._succeeds_on_all(removed)
        return None

    def _succeeds_on_all(self, work: Callable[[], object]) -> bool:
        """Do the work on all ranks. Return True on all if all succeeded, so they stay in step."""
        return self.peers.sum(self._succeeds(work)) == self.peers.world

    def _succeeds(self, work: Callable[[], object]) -> bool:
        try:
            work()
        except (TransferError, OSError, ValueError) as error:
            print(f"trainer rank {self.peers.rank}: store upkeep failed: {error}", flush=True)
            return False
        return True


def _with_digest(values: np.ndarray) -> tuple[np.ndarray, bytes]:
    return values, xxh3(values)


def collect(store: Path, keep: int) -> list[Step]:
    """Remove the edges that no reader needs any more. It keeps the edges to the last `keep`
    versions. It also keeps the newest full version that is old enough to lead to all of them, and
    the edges from there on.

    A call removes an edge's manifest, so that the edge can't be opened any more. The next call
    removes its files, so that readers have the time of one version to end. Uncommitted edges are
    removed, too. Returns the (version, base) of each edge whose manifest was removed."""
    store = Path(store)
    edges = list_edges(Folder(store))
    committed = {step for step in edges if (store / edge_name(*step) / MANIFEST).exists()}
    oldest = min(sorted({version for version, _ in committed})[-keep:], default=0)
    full = max((v for v, base in committed if base is FULL and v <= oldest), default=INITIAL)
    kept = {(full, FULL), (full, INITIAL)}
    dead = [step for step in edges - kept if step[0] < oldest and step[0] <= full]
    for step in dead:
        folder = store / edge_name(*step)
        if step in committed:
            (folder / MANIFEST).unlink(missing_ok=True)
            continue
        _remove(folder)
    return sorted(committed.intersection(dead), key=lambda s: (s[0], s[1] is FULL, s[1] or 0))


def _remove(edge: Path) -> None:
    """Remove an edge's folder, its manifest first, so that no reader opens a half removed edge."""
    (edge / MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(edge, ignore_errors=True)
    if edge.parent.is_dir() and not any(edge.parent.iterdir()):
        edge.parent.rmdir()
