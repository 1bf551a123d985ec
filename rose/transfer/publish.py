"""One trainer rank's side of a store: difference its own shard, write the edge, tidy up afterwards.

Each rank keeps a copy of its blocks' last published patterns (model bytes / ranks) and differences
against it; nobody ever holds another rank's values. `publish` is what engines wait for; `tidy`
writes full versions and collects while they roll out.
"""

from __future__ import annotations

import functools
import shutil
import time
import uuid
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec
import numpy as np
import xxhash

from rose.transfer import codec
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

Part = tuple[np.ndarray, bytes, bytes]  # of an edge: a block's payload, its digests before, after


class Peers(Protocol):
    """The trainer ranks, as far as publishing needs them."""

    rank: int
    world: int

    def barrier(self) -> None: ...

    def sum(self, value: int) -> int: ...


class Published(NamedTuple):
    version: int
    nbytes: int  # of all ranks' payloads of the edge from the version before
    encode_s: float
    write_s: float


class Publisher:
    """Made on all ranks together; rank 0 creates the store.

    `read(block)`: the block's values now, (n,) uint16 or uint32 patterns that nobody will write to.
    Readers begin with what it gives while this is made; with zeros, where the plan is an adapter's.
    """

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
    ):
        self.store, self.peers = Path(store), peers
        self._read, self._threads, self._timeout_s = read, threads, timeout_s
        self._full_every, self._keep = full_every, keep
        self._mine = plan.owned(peers.rank)
        self._version = INITIAL
        self._full: int | None = None  # the last full version
        self._chain: list[Step] = []  # from the model folder's weights to the last version
        self._lacks_initial = False  # the full version has no edge from these weights beside it
        self._full_bytes, self._since_full = 0, 0
        if peers.rank == 0:
            create(self.store, msgspec.structs.replace(plan, lineage=uuid.uuid4().hex))
        peers.barrier()
        self.plan, _ = read_plan(Folder(self.store))  # with the lineage
        if msgspec.structs.replace(self.plan, lineage=plan.lineage) != plan:
            raise TransferError(
                f"{self.store}: trainer rank {peers.rank} would cut the model in another way than "
                "rank 0, or has another base model"
            )
        self._begun: int | None = None  # version that is being encoded
        self._pool: ThreadPoolExecutor | None = None  # meanwhile
        self._encoding: list[Future[Part]] = []  # a block of `_mine` each
        with ThreadPoolExecutor(threads, "encode") as pool:  # block -> patterns, their digest
            first = self._zeros if plan.base else self._now
            self._previous = dict(zip(self._mine, pool.map(first, self._mine), strict=True))

    def ahead(self, version: int) -> None:
        """Begin to encode `version`: this rank's values are final, though its peers may not have
        them yet."""
        if version <= self._version or self._begun is not None:
            last = self._version if self._begun is None else self._begun
            raise ValueError(f"version {version} after {last}: versions grow, one at a time")
        self._begun, self._pool = version, ThreadPoolExecutor(self._threads, "encode")
        self._encoding = [self._pool.submit(self._part, block) for block in self._mine]

    def publish(
        self, version: int, send: Callable[[str, memoryview], None] | None = None
    ) -> Published:
        """Write the weights as `version`; when this returns on rank 0 it is committed.
        `send(name, data)` begins the broadcast of this rank's file of the edge from the version
        before.

        Raises `TransferError`, after which this object is of no use, and `ValueError` for a version
        that is not above the last, or not the one that was begun.
        """
        if self._begun is None:
            self.ahead(version)
        elif self._begun != version:
            raise ValueError(f"version {version}, and {self._begun} was begun")
        start, base = time.perf_counter(), self._version
        writer = self._writer(version, base)
        for block, future in zip(self._mine, self._encoding, strict=True):
            writer.add(block, *future.result())
        self._pool.shutdown()
        if send is not None:
            send(f"{edge_name(version, base)}/{writer.path.name}", writer.image())
        encoded = time.perf_counter()
        writer.finish()
        if self.peers.rank == 0:
            commit(self.store, self.plan, version, base, self._timeout_s)
        nbytes = self.peers.sum(writer.nbytes)
        self._begun, self._encoding, self._version = None, [], version
        self._chain.append((version, base))
        self._since_full += nbytes
        written = time.perf_counter() - encoded
        if self._full is None:  # nobody rolls out yet; later ones are made by `tidy`
            self.write_full()
        return Published(version, nbytes, encoded - start, written)

    def write_hashes(self, folder: Path) -> None:
        """Those of the last version that was published, as a checkpoint of it keeps them. Raises
        `TransferError`."""
        digests = {block: digest for block, (_, digest) in self._previous.items()}
        write_hashes(folder, self.peers.rank, self.plan, self._version, digests)

    def full_due(self) -> bool:
        """At first, each `full_every` versions, and when the deltas since the last outweigh it (as
        a log is rewritten)."""
        return (
            self._full is None
            or self._version - self._full >= self._full_every
            or self._since_full >= self._full_bytes
        )

    def _writer(self, version: int, base: int | None) -> EdgeWriter:
        return EdgeWriter(self.store, self.plan, version, base, self.peers.rank)

    def _now(self, number: int) -> tuple[np.ndarray, bytes]:
        return _with_digest(self._read(self.plan.blocks[number]))

    def _zeros(self, number: int) -> tuple[np.ndarray, bytes]:
        block = self.plan.blocks[number]
        count = size(block, self.plan.tensors[block.tensor].columns)
        return _with_digest(np.zeros(count, self.plan.width(number)))

    def _part(self, number: int) -> Part:
        """Even of what is unchanged it is said: the reader checks that it has the same."""
        (previous, old), (values, new) = self._previous[number], self._now(number)
        self._previous[number] = values, new
        return codec.encode(values, previous), old, new

    # ----------------------------------------------------------------- when nobody waits

    def tidy(self) -> list[Step]:
        """Write the last version in full, if that is due; then, on rank 0, remove what nobody
        needs; what was removed. What fails of this is said, and costs late readers some speed and
        nobody anything else."""
        if self.full_due():
            self.write_full()
        elif self._lacks_initial and self._version - self._full < self._keep:
            self._write_initial()  # what it is made of is still there
        removed: list[Step] = []
        if self.peers.rank == 0:
            self._tried(lambda: removed.extend(collect(self.store, self._keep)))
        return removed

    def write_full(self) -> None:
        """The last version once more, without a base, and, made of the differences since it was
        last done, from the model folder's weights: most of a joiner's are on its own disk."""

        def whole(block: int) -> Part:
            values, digest = self._previous[block]
            return codec.encode(values, None), b"", digest

        nbytes = self._edge(FULL, lambda: whole)
        if nbytes is None:
            return
        self._full, self._full_bytes, self._since_full = self._version, nbytes, 0
        self._write_initial()

    def _write_initial(self) -> None:
        # the first version's one difference is from these weights
        steps = self._chain
        done = len(steps) == 1 or self._edge(INITIAL, lambda: self._composed(steps)) is not None
        self._lacks_initial = not done
        if done:
            self._chain = [(self._version, INITIAL)]

    def _composed(self, steps: list[Step]) -> Callable[[int], Part]:
        """From a block of this rank to the sum of what its files of `steps` say of it. Raises
        `TransferError`; what is returned also `ValueError`, for a payload that is none."""
        source = Folder(self.store)
        plan = read_plan(source)
        edges = [Edge(source, *step, *plan) for step in steps]

        def composed(block: int) -> Part:
            parts = [edge.payloads(self.peers.rank, [block])[block] for edge in edges]
            payloads = (np.frombuffer(payload, np.uint8) for _, payload in parts)
            old, new = parts[0][0]["old"].tobytes(), parts[-1][0]["new"].tobytes()
            return functools.reduce(codec.compose, payloads), old, new

        return composed

    def _edge(self, base: int | None, source: Callable[[], Callable[[int], Part]]) -> int | None:
        """Write and commit one to the last version, of what `source()` makes of each block; bytes
        of all ranks' payloads, or null if it did not work on all of them."""
        writer = self._writer(self._version, base)

        def write() -> None:
            part = source()
            with ThreadPoolExecutor(self._threads, "encode") as pool:
                for block, made in zip(self._mine, pool.map(part, self._mine), strict=True):
                    writer.add(block, *made)
            writer.finish()

        def committed() -> None:
            if self.peers.rank == 0:
                commit(self.store, self.plan, self._version, base, self._timeout_s)

        def removed() -> None:  # the collector would take it for one that is being written
            if self.peers.rank == 0:
                _remove(writer.path.parent)

        if self._together(write) and self._together(committed):
            return self.peers.sum(writer.nbytes)
        self._together(removed)
        return None

    def _together(self, work: Callable[[], object]) -> bool:
        """Whether it worked on all ranks: none goes on alone, or leaves the others waiting."""
        return self.peers.sum(self._tried(work)) == self.peers.world

    def _tried(self, work: Callable[[], object]) -> bool:
        try:
            work()
        except (TransferError, OSError, ValueError) as error:
            print(f"trainer rank {self.peers.rank} left out: {error}", flush=True)
            return False
        return True


def _with_digest(values: np.ndarray) -> tuple[np.ndarray, bytes]:
    return values, xxhash.xxh3_128_digest(values.data.cast("B"))


def collect(store: Path, keep: int) -> list[Step]:
    """Remove the edges that nobody needs. Kept are those that end at one of the last `keep`
    versions, the newest full one that is old enough to lead to all of these, and what leads from it
    onwards.

    An edge's manifest goes first, so that nobody opens it any more; its files at the next call, so
    that who reads them has the time of a version to end. What was never committed goes, too.
    Returns the (version, base) whose manifest was removed.
    """
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
    """Its manifest first: nobody opens what is half removed."""
    (edge / MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(edge, ignore_errors=True)
    if edge.parent.is_dir() and not any(edge.parent.iterdir()):
        edge.parent.rmdir()
