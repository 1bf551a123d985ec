"""One trainer rank's side of a store: difference its own shard, write the edge, tidy up afterwards.

Each rank keeps a copy of its blocks' last published patterns (model bytes / ranks) and differences
against it; nobody ever holds another rank's values. `publish` is what engines wait for; `tidy`
squashes and collects while they roll out.
"""

from __future__ import annotations

import functools
import os
import shutil
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec
import numpy as np
import xxhash

from rose.transfer import codec
from rose.transfer.blocks import Block
from rose.transfer.edge import StoredEdge, pack_table, read_plan
from rose.transfer.errors import TransferError
from rose.transfer.route import Step, present, shortest
from rose.transfer.source import Folder, leases
from rose.transfer.store import (
    FULL,
    INITIAL,
    MANIFEST,
    EdgeWriter,
    Plan,
    commit,
    create,
    edge_name,
    prepare,
)
from rose.transfer.versions import write_hashes

AHEAD = 8  # blocks encoded but not yet handed on, per thread


class Peers(Protocol):
    """The trainer ranks, as far as publishing needs them."""

    rank: int
    world: int

    def barrier(self) -> None: ...

    def sum(self, value: int) -> int: ...


class Stream(Protocol):
    """Where the payloads of one edge also go: a broadcast to dedicated ranks."""

    def send(self, data) -> None: ...

    def finish(self, table: bytes) -> None: ...


class Published(NamedTuple):
    version: int
    nbytes: int  # of all ranks' payloads of the edge from the version before
    encode_s: float
    write_s: float


class Publisher:
    """Made on all ranks together; rank 0 creates the store.

    `read(block)`: the block's values now, (n,) uint16 or uint32 patterns that nobody will write to.
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
        self._read, self._ahead, self._timeout_s = read, AHEAD * threads, timeout_s
        self._full_every, self._keep = full_every, keep
        self._mine = [
            number for number, block in enumerate(plan.blocks) if block.owner == peers.rank
        ]
        self._version = INITIAL
        self._first: int | None = None
        self._fulls: list[int] = []  # the last two
        self._edges: set[Step] = set()  # that were committed; rank 0 may have removed some
        self._full_bytes, self._since_full = 0, 0
        if peers.rank == 0:
            create(self.store, msgspec.structs.replace(plan, lineage=uuid.uuid4().hex))
        peers.barrier()
        self.plan, _ = read_plan(Folder(self.store))  # with the lineage
        if msgspec.structs.replace(self.plan, lineage=plan.lineage) != plan:
            raise TransferError(
                f"{self.store}: trainer rank {peers.rank} would cut the model in another way than "
                "rank 0"
            )
        self._threads = threads
        self._pool: ThreadPoolExecutor | None = None  # while a version is being encoded
        self._begun: int | None = None  # that version
        self._waiting: Iterator[int] = iter(())  # blocks that are not being encoded yet
        self._encoding: deque[tuple[int, Future]] = deque()
        with ThreadPoolExecutor(threads, "encode") as pool:  # block -> patterns, their digest
            self._previous = dict(zip(self._mine, pool.map(self._now, self._mine), strict=False))

    def ahead(self, version: int) -> None:
        """Begin to encode `version`: this rank's values are final, though its peers may not have
        them yet."""
        if version <= self._version or self._begun is not None:
            last = self._version if self._begun is None else self._begun
            raise ValueError(f"version {version} after {last}: versions grow, one at a time")
        self._begun, self._waiting = version, iter(self._mine)
        self._pool = ThreadPoolExecutor(self._threads, "encode")
        self._encode_more()

    def publish(self, version: int, begin: Callable[[str], Stream] | None = None) -> Published:
        """Write the weights as `version`; when this returns on rank 0 it is committed.
        `begin(edge)` opens the broadcast of the edge from the version before.

        Raises `TransferError`, after which this object is of no use, and `ValueError` for a version
        that is not above the last, or not the one that was begun.
        """
        if self._begun is None:
            self.ahead(version)
        elif self._begun != version:
            raise ValueError(f"version {version}, and {self._begun} was begun")
        delta = self._version
        # nobody rolls out yet; later ones are made by `tidy`
        bases = [delta] if self._fulls else [delta, FULL]
        if self.peers.rank == 0:
            for base in bases:
                prepare(self.store, version, base)
        self.peers.barrier()
        start = time.perf_counter()
        edges = {
            base: EdgeWriter(self.store, self.plan, version, base, self.peers.rank)
            for base in bases
        }
        stream = begin(edge_name(version, delta)) if begin is not None else None
        self._encode(edges, delta, stream)
        if stream is not None:
            stream.finish(pack_table(edges[delta].table()))
        encoded = time.perf_counter()
        for writer in edges.values():
            writer.finish()
        if self.peers.rank == 0:
            for base in bases:
                commit(self.store, self.plan, version, base, self._timeout_s)
        nbytes = {base: self.peers.sum(writer.nbytes) for base, writer in edges.items()}
        self._edges |= {(version, base) for base in bases}
        self._version = version
        self._since_full += nbytes[delta]
        if FULL in bases:
            self._has_full(nbytes[FULL])
        self._first = version if self._first is None else self._first
        return Published(version, nbytes[delta], encoded - start, time.perf_counter() - encoded)

    def _has_full(self, nbytes: int) -> None:
        self._fulls, self._full_bytes, self._since_full = (
            [*self._fulls[-1:], self._version],
            nbytes,
            0,
        )

    def write_hashes(self, folder: Path) -> None:
        """Those of the last version that was published, as a checkpoint of it keeps them. Raises
        `TransferError`."""
        digests = {block: digest for block, (_, digest) in self._previous.items()}
        write_hashes(folder, self.peers.rank, self.plan, self._version, digests)

    def full_due(self) -> bool:
        """Each `full_every` versions, and when the deltas since the last outweigh it (as a log is
        rewritten)."""
        return (
            self._version - self._fulls[-1] >= self._full_every
            or self._since_full >= self._full_bytes
        )

    def _encode_more(self) -> None:
        full = not self._fulls
        while (
            len(self._encoding) < self._ahead and (block := next(self._waiting, None)) is not None
        ):
            self._encoding.append((block, self._pool.submit(self._one, block, full)))

    def _encode(
        self, edges: dict[int | None, EdgeWriter], delta: int, stream: Stream | None
    ) -> None:
        """Blocks are encoded by several threads and handed on in order, so that the first travel
        while the last are still being encoded."""
        while self._encoding:
            block, future = self._encoding.popleft()
            sparse, dense, old, new = future.result()
            self._encode_more()
            if dense is not None:
                edges[FULL].add(block, dense, b"", new)
            edges[delta].add(block, sparse, old, new)
            if stream is not None:
                stream.send(sparse)
        self._pool.shutdown()
        self._begun = None

    def _now(self, number: int) -> tuple[np.ndarray, bytes]:
        values = self._read(self.plan.blocks[number])
        return values, xxhash.xxh3_128_digest(values.data.cast("B"))

    def _one(self, number: int, full: bool) -> tuple:
        """(payload of the delta, of the full edge or null, old digest, new digest)."""
        (previous, before), (new, digest) = self._previous[number], self._now(number)
        self._previous[number] = (new, digest)
        dense = codec.encode(new, None) if full else None
        # Even of what is unchanged it is said: the reader checks that it has the same.
        return codec.encode(new, previous), dense, before, digest

    # ----------------------------------------------------------------- when nobody waits

    def tidy(self) -> list[Step]:
        """Squash the edges that end at the last version; write it in full, if that is due; then, on
        rank 0, remove what nobody needs; what was removed.

        Beside each full version one from the model folder's weights is made: most of a joiner's
        weights it has on its own disk. What fails of this is said, and costs late readers some
        speed and nobody anything else.
        """
        last, span = self._version, 2
        while last % span == 0 and last - span >= self._first:
            middle = last - span // 2
            if not self._squash(last - span, [(middle, last - span), (last, middle)]):
                break
            span *= 2
        if self.full_due():
            self.write_full()
        if self._fulls[-1] == last and len(self._fulls) == 2:
            before = self._fulls[0]
            self._squash(INITIAL, [(before, INITIAL), *shortest(list(self._edges), before, last)])
        removed: list[Step] = []
        if self.peers.rank == 0:
            self._tried(lambda: removed.extend(collect(self.store, self._keep)))
        return removed

    def write_full(self) -> bool:
        """The last version once more, without a base; whether that worked on all ranks."""
        writer = EdgeWriter(self.store, self.plan, self._version, FULL, self.peers.rank)
        with ThreadPoolExecutor(self._threads, "encode") as pool:
            payloads = pool.map(
                lambda block: codec.encode(self._previous[block][0], None), self._mine
            )
            for block, payload in zip(self._mine, payloads, strict=False):
                writer.add(block, payload, b"", self._previous[block][1])
        done = self._finish(writer, FULL)
        if done:
            self._has_full(self.peers.sum(writer.nbytes))
        return done

    def _squash(self, base: int, steps: list[Step]) -> bool:
        """One edge from `base` to the last version, from this rank's files of `steps`; false if one
        of these is gone, or the disk takes no more."""
        there = all(os.path.exists(self.store / edge_name(*step) / MANIFEST) for step in steps)
        if self.peers.sum(there) < self.peers.world:
            return False
        writer = EdgeWriter(self.store, self.plan, self._version, base, self.peers.rank)
        return self._together(lambda: self._compose(steps, writer)) and self._finish(writer, base)

    def _compose(self, steps: list[Step], writer: EdgeWriter) -> None:
        """This rank's blocks of `steps`, squashed. Raises `TransferError`, `OSError`, and
        `ValueError` for a payload that is as it was written, and none."""
        with closing(Folder(self.store)) as source:
            plan, digest = read_plan(source)
            parts = [
                StoredEdge(source, *step, plan, digest).payloads(self.peers.rank, self._mine)
                for step in steps
            ]

        def composed(block: int) -> np.ndarray:
            payload, *others = (np.frombuffer(part[block][1], np.uint8) for part in parts)
            return functools.reduce(codec.compose, others, payload)

        with ThreadPoolExecutor(self._threads, "squash") as pool:
            for block, payload in zip(self._mine, pool.map(composed, self._mine), strict=False):
                writer.add(
                    block,
                    payload,
                    parts[0][block][0]["old"].tobytes(),
                    parts[-1][block][0]["new"].tobytes(),
                )

    def _finish(self, writer: EdgeWriter, base: int | None) -> bool:
        done = self._together(writer.finish) and self._together(
            lambda: (
                self.peers.rank
                or commit(self.store, self.plan, self._version, base, self._timeout_s)
            )
        )
        if done:
            self._edges.add((self._version, base))
        return done

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


def collect(store: Path, keep: int) -> list[Step]:
    """Remove the edges that nobody needs: kept are those that end at one of the last `keep`
    versions, the newest full one that is old enough to lead to all of these, what leads from it
    onwards, and what readers hold leases for.

    A manifest goes first, so that nobody opens an edge that is half removed. Returns the removed
    (version, base).
    """
    store = Path(store)
    source = Folder(store)
    edges = {step for step in present(source) if (store / edge_name(*step) / MANIFEST).exists()}
    source.close()
    versions = sorted({version for version, _ in edges})
    if not versions:
        return []
    oldest = versions[-keep:][0]
    full = max(
        (version for version, base in edges if base is FULL and version <= oldest), default=None
    )
    # a relay's root is the folder of all stores of the run
    held = leases(store, time.time()) | {
        name.removeprefix(f"{store.name}/") for name in leases(store.parent, time.time())
    }
    dead = [
        step
        for step in sorted(edges, key=lambda s: (s[0], s[1] is None, s[1] or 0))
        if step[0] < oldest
        and full is not None
        and step[0] <= full
        and step != (full, FULL)
        and step != (full, INITIAL)
        and edge_name(*step) not in held
    ]
    for step in dead:
        folder = store / edge_name(*step)
        (folder / MANIFEST).unlink(missing_ok=True)
        shutil.rmtree(folder, ignore_errors=True)
        if not any(folder.parent.iterdir()):
            folder.parent.rmdir()
    return dead
