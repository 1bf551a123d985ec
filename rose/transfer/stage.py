"""Bring live weights from one version to another: stage while they are in use, flip while they are
not.

Staging never writes the live weights. For each block it decodes the payloads of the route, which is
one edge or several. It keeps indices and differences, or the whole new block if many values change.
1. If the route is one edge, the live blocks are hashed where they are (rose/transfer/digests.py),
   or their hashes are known from an earlier comparison (`known_digest`). Then no live value is
   read: the differences turn a block with the edge's old hash into a block with its new hash.
2. Otherwise, or if many values change, the live block is read, and the payloads are applied to the
   copy. The hash of the result is compared with the manifest's.

A failure during staging leaves the old version as it was. `Staged.flip` only writes, and restores
the old values if it fails. `Staged.check` hashes blocks while the weights are in use: on a GPU all
changed blocks, on a CPU the whole ones and those that were compared when they were staged.

Host memory: three blocks and twice a batch's payloads per thread, and whole blocks of at most
`dense_bytes`. `flip` computes further blocks again. A changed bfloat16 value takes 6 bytes until it
is on the device. Device memory: see rose/transfer/changes.py, and one block while it is read or
written.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from rose.transfer import codec
from rose.transfer.base import Base, xxh3
from rose.transfer.blocks import Rectangle, Tensor, rectangles, size
from rose.transfer.changes import Changes, budget
from rose.transfer.digests import digests, hashes_on_device
from rose.transfer.edge import Edge, Entry
from rose.transfer.errors import Corrupted, TransferError
from rose.transfer.live import Live, Place, one_run
from rose.transfer.store import WIDTHS, Plan

# Bounds the blocks whose payloads are fetched together, by their bytes and their count.
BATCH_BYTES = 32 * 2**20
BATCH_BLOCKS = 256
# Share of changed values from which a block is kept whole. A bfloat16 value that is kept alone
# takes 6 bytes, in a whole block 2.
DENSE = 1 / 4


class WrongBase(TransferError):
    """The live weights are not the version that the reader claimed."""


class _Change(NamedTuple):
    """The change of a block."""

    block: int
    changed: int  # changed values
    # Flat indices in the parameter, and differences; or all new patterns (n,) if many change.
    moves: tuple[np.ndarray, np.ndarray] | None
    whole: np.ndarray | None
    wanted: bytes  # the block's hash after the change
    nbytes: int  # bytes of payloads read


class Staged:
    """The verified changes that a flip needs, as `stage` returns them."""

    def __init__(
        self, live: Live, places: Mapping[int, Place], threads: int, work: _Decoder | None = None
    ):
        self._live, self._places, self._work, self._threads = live, places, work, threads
        self.changes = Changes(live, threads)
        self._dense: dict[int, torch.Tensor] = {}  # new patterns of whole blocks
        self._late: list[int] = []  # blocks beyond `dense_bytes`, which the flip computes again
        self._hashes: dict[int, bytes] = {}  # hashes after the flip, of the blocks to be checked
        self._lock = threading.Lock()
        self.digests: dict[int, bytes] = {}  # the route's xxh3-128 of each block after the flip
        self.changed = 0  # changed values
        self.nbytes = 0  # bytes of payloads read
        self.route: list[str] = []  # names of the edges
        self.mirrored = 0  # edges read from a mirror
        self.dense_bytes = 0
        self.copy_s = 0.0  # seconds for which changes were copied to the device

    def _keep(self, change: _Change, dense_bytes: int, check: bool) -> None:
        """Keep a change. After the flip it is checked if it is a whole block, or if `check`."""
        with self._lock:
            self.nbytes += change.nbytes
            self.digests[change.block] = change.wanted
            if not change.changed:
                return
            self.changed += change.changed
            if check or change.moves is None:
                self._hashes[change.block] = change.wanted
            if change.moves is not None:
                self.changes.add(self._places[change.block].parameter, *change.moves)
            elif self.dense_bytes + change.whole.nbytes <= dense_bytes:
                self._dense[change.block] = torch.from_numpy(_signed(change.whole))
                self.dense_bytes += change.whole.nbytes
            else:
                self._late.append(change.block)

    def _upload(self, device_bytes: int | None) -> None:
        """Copy the changes that fit to the parameters' device, so that the flip copies less."""
        began = time.perf_counter()
        with self._live.side_stream():
            self.changes.upload(budget(self._live, device_bytes))
        self._live.synchronize()
        self.copy_s = time.perf_counter() - began
        self._late.sort()

    @torch.no_grad()
    def flip(self) -> None:
        """Write the changes into the live weights, which nothing may read meanwhile. If it raises
        `TransferError`, the weights are the old ones or, if the message says so, a mixture."""
        done_dense, half_done, late = [], None, False
        try:
            for edge in self._work.route if self._late else ():  # checked before any write
                edge.require()
            self.changes.put(1)
            for block, values in self._dense.items():
                half_done = block, torch.from_numpy(_signed(self._live.read(self._places[block])))
                self._live.write(self._places[block], values)
                values.copy_(half_done[1])
                done_dense.append(block)
                half_done = None
            for block in self._late:
                change = next(self._work.changes([block], verify=False))
                values = torch.from_numpy(_signed(change.whole))
                late = True
                self._live.write(self._places[block], values)
        except Exception as error:
            try:
                if late:
                    raise error
                self._undo(done_dense, half_done)
            except Exception:
                raise TransferError(
                    f"the flip failed, and the weights are a mixture now: {error}"
                ) from error
            raise TransferError(f"the flip failed, and was undone: {error}") from error

    def _undo(self, done_dense: list[int], half_done: tuple[int, torch.Tensor] | None) -> None:
        if half_done is not None:  # `_dense` still has this block's new values.
            self._live.write(self._places[half_done[0]], half_done[1])
        for block in done_dense:
            values = torch.from_numpy(_signed(self._live.read(self._places[block])))
            self._live.write(self._places[block], self._dense[block])
            self._dense[block].copy_(values)
        self.changes.put(-1)

    def check(self) -> None:
        """Hash what the flip wrote. Raises `Corrupted` if a hash is wrong."""
        places = {block: self._places[block] for block in self._hashes}
        for block, found in digests(self._live, places, self._threads).items():
            if found != (wanted := self._hashes[block]):
                raise Corrupted(
                    f"live parameter {self._places[block].parameter}, block {block}: xxh3-128 "
                    f"{found.hex()} after the flip, expected {wanted.hex()}; the weights are a "
                    "mixture now"
                )

    def release(self) -> None:
        """Release the device memory. After that, neither `flip` nor `check` can be called."""
        self.changes.release()


def stage(
    live: Live,
    plan: Plan,
    places: Mapping[int, Place],
    route: list[Edge],
    from_live: bool,
    threads: int,
    dense_bytes: int,
    tick: Callable[[], None] = lambda: None,
    device_bytes: int | None = None,
    known_digest: Callable[[int], bytes | None] = lambda block: None,
) -> Staged:
    """Stage the last version of `route`. Its first edge builds on the live weights if `from_live`.

    At most `device_bytes` of the device are taken, or all free memory but a reserve if it is None.
    `known_digest(block)` is the xxh3-128 of the live block from an earlier comparison, or None if
    the block must be compared now. `tick` is called repeatedly and may raise to cancel the staging.
    Raises `WrongBase`, and `Missing` or `Corrupted` with the failed edge in the attribute `edge`.
    """
    due = {block for block in places if known_digest(block) is None}
    known = known_digest
    if from_live and len(route) == 1:
        compared = digests(live, {block: places[block] for block in due}, threads, tick)
        known = lambda block: compared.get(block) or known_digest(block)  # noqa: E731
    work = _Decoder(live, plan, places, route, from_live, known)
    staged = Staged(live, places, threads, work)
    on_device = hashes_on_device(live)

    def run(batch: list[int]) -> None:
        tick()
        with live.side_stream():
            for change in work.changes(batch):
                staged._keep(change, dense_bytes, on_device or change.block in due)

    with ThreadPoolExecutor(threads, "stage") as pool:
        list(pool.map(run, _batches(plan, places)))  # An error cancels the other batches.
    staged._upload(device_bytes)
    return staged


@dataclass(frozen=True)
class _Decoder:
    live: Live
    plan: Plan
    places: Mapping[int, Place]
    route: list[Edge]
    from_live: bool
    known_digest: Callable[[int], bytes | None]

    def changes(self, batch: list[int], verify: bool = True) -> Iterator[_Change]:
        """Yield the changes of a batch of blocks. First come those that are decoded without values,
        then those of blocks that are computed whole, one by one: a batch of them would take 64 MiB
        per thread. Without `verify`, all blocks are computed whole and not compared."""
        rank, found = self.plan.blocks[batch[0]].owner, []
        for edge in self.route:
            try:
                found.append(edge.payloads(rank, batch))
            except TransferError as error:
                error.edge = edge
                raise
        sparse = self._sparse_changes(found[0]) if verify and len(found) == 1 else {}
        yield from sparse.values()
        for block in batch:
            if block not in sparse:
                steps = [(edge, *part[block]) for edge, part in zip(self.route, found, strict=True)]
                yield self._whole_change(block, steps, verify)

    def _sparse_changes(self, found: dict[int, tuple[Entry, memoryview]]) -> dict[int, _Change]:
        """Decode the changes of blocks without their values: blocks that are known to have the
        edge's old hash, and of which few values change."""
        known = [block for block in found if self.known_digest(block) == found[block][0].old]
        # Blocks without a shift are decoded in calls of their own, whose arrays are freed at once.
        shifts = {block: self._shift(block) for block in known}
        kinds = {b: (self._matrix(b).element_size(), shifts[b] is None) for b in known}
        changes = {}
        for kind in set(kinds.values()):
            blocks = [block for block in known if kinds[block] == kind]
            values = [self.places[block].size for block in blocks]
            most = [math.ceil(DENSE * count) - 1 for count in values]
            payloads = [found[block][1] for block in blocks]
            added = [shifts[block] or 0 for block in blocks]
            decoded = codec.changes(payloads, kind[0], values, most, added)
            for block, moves in zip(blocks, decoded, strict=True):
                if moves is None:
                    continue
                if shifts[block] is None:
                    moves = self.live.indices(self.places[block], moves[0]), moves[1]
                entry, payload = found[block]
                changed = len(moves[0])
                changes[block] = _Change(block, changed, moves, None, entry.new, len(payload))
        return changes

    def _matrix(self, block: int) -> torch.Tensor:
        return self.live.matrices[self.places[block].parameter]

    def _shift(self, block: int) -> int | None:
        """Return the number that leads from positions in a block to int32 indices in its parameter,
        or None if no single number does."""
        place, matrix = self.places[block], self._matrix(block)
        if matrix.numel() >= 2**31 or not one_run(place, matrix.shape[1]):
            return None
        first = place.rectangles[0]
        return first.first_row * matrix.shape[1] + first.first_column

    def _whole_change(self, block: int, steps: list[tuple], verify: bool) -> _Change:
        """Apply the payloads of `steps`, (edge, entry, payload), to a copy of the live block."""
        nbytes = sum(len(payload) for _, _, payload in steps)
        old = self.live.view(self.places[block])
        new, base = old.copy(), self.from_live
        for edge, _, payload in steps:
            try:
                if not base and codec.info(payload).needs_base:
                    raise ValueError("it needs a base, and is of a full version")
                codec.apply(payload, new)
            except ValueError as error:
                raise _damaged_error(edge, block, str(error)) from None
            base = True
        wanted = steps[-1][1].new
        if not verify:
            return _Change(block, len(new), None, new, wanted, nbytes)
        if xxh3(new) != wanted:
            raise self._mismatch(block, steps, old, new)
        changed = int(np.count_nonzero(old != new))
        if changed >= DENSE * len(new):
            return _Change(block, changed, None, new, wanted, nbytes)
        positions, differences = codec.differences(new, old)
        moves = self.live.indices(self.places[block], positions), differences
        return _Change(block, changed, moves, None, wanted, nbytes)

    def _mismatch(self, block: int, steps: list[tuple], old: np.ndarray, new: np.ndarray):
        """Return the error for a wrong hash: of the live block, or else of the payload."""
        needs_base = all(codec.info(payload).needs_base for _, _, payload in steps)
        if needs_base and xxh3(old) != steps[0][1].old:
            name = self.plan.tensors[self.plan.blocks[block].tensor].name
            return WrongBase(
                f"{steps[0][0].name} builds on other weights than the live ones: block {block} of "
                f"{name} has xxh3-128 {xxh3(old).hex()}, expected {steps[0][1].old.hex()}"
            )
        edge, entry, _ = steps[-1]
        text = f"its xxh3-128 is {xxh3(new).hex()}, the table says {entry.new.hex()}"
        return _damaged_error(edge, block, text)


def _damaged_error(edge: Edge, block: int, why: str) -> Corrupted:
    damaged = Corrupted(f"{edge.source}/{edge.name}: block {block}: {why}")
    damaged.edge = edge
    return damaged


def _batches(plan: Plan, blocks: Iterable[int]) -> list[list[int]]:
    """Group blocks into batches of neighbours with the same owner."""
    batches: list[list[int]] = []
    owner, room = None, 0
    for number in sorted(blocks, key=lambda number: (plan.blocks[number].owner, number)):
        block = plan.blocks[number]
        nbytes = size(block, plan.tensors[block.tensor].columns) * plan.width(number).itemsize
        if block.owner != owner or nbytes > room or len(batches[-1]) == BATCH_BLOCKS:
            batches.append([])
            owner, room = block.owner, BATCH_BYTES
        batches[-1].append(number)
        room -= nbytes
    return batches


def place_blocks(
    plan: Plan | Base, slices: Callable[[str, tuple[int, ...]], object], live: Live
) -> tuple[dict[int, Place], dict[str, int]]:
    """Return the places of the blocks that this rank holds in the live parameters, and how many
    values of each parameter the blocks fill.

    `slices(name, shape)` returns a `rose.engine.layout.LocalSlice` or None. Raises `TransferError`
    if a tensor doesn't fit, or a block is only partly in this rank's part."""
    places: dict[int, Place] = {}
    filled = dict.fromkeys(live.matrices, 0)
    local = {}
    for number, tensor in enumerate(plan.tensors):
        try:
            found = slices(tensor.name, tuple(tensor.shape))
        except ValueError as error:
            raise TransferError(str(error)) from None
        if found is not None:
            part = found.parameter, _as_rectangle(found.source), _as_rectangle(found.destination)
            local[number] = part
            _check_fit(tensor, found.parameter, part[2], live)
    for number, block in enumerate(plan.blocks):
        if block.tensor not in local:
            continue
        tensor, (parameter, source, target) = plan.tensors[block.tensor], local[block.tensor]
        place = Place(parameter, _clipped(rectangles(block, tensor.columns), source, target))
        if not place.rectangles:
            continue
        if place.size != size(block, tensor.columns):
            raise TransferError(
                f"block {number} of {tensor.name} lies half in this engine's part: the trainer cut "
                "it for other tensor-parallel degrees; add this engine's to "
                "transfer.tensor_parallel"
            )
        places[number] = place
        filled[parameter] += place.size
    return places, filled


def _as_rectangle(slices: tuple[slice, ...]) -> Rectangle:
    rows, columns = (*slices, slice(0, 1))[:2]
    return Rectangle(rows.start, rows.stop, columns.start, columns.stop)


def _check_fit(tensor: Tensor, parameter: str, target: Rectangle, live: Live) -> None:
    matrix = live.matrices.get(parameter)
    if matrix is None or target.last_row > matrix.shape[0] or target.last_column > matrix.shape[1]:
        raise TransferError(
            f"tensor {tensor.name!r} {tuple(tensor.shape)} doesn't fit the engine's parameter "
            f"{parameter} {tuple(matrix.shape) if matrix is not None else '(absent)'}"
        )
    if matrix.element_size() != WIDTHS[tensor.dtype].itemsize:
        raise TransferError(
            f"tensor {tensor.name!r} is {tensor.dtype}, the engine's parameter {parameter} "
            f"has {matrix.element_size()} bytes a value; the engine must run in model.dtype"
        )


def _clipped(whole: list[Rectangle], source: Rectangle, target: Rectangle) -> list[Rectangle]:
    """Return the parts of rectangles `whole` in `source`, moved as from `source` to `target`."""
    down, right = target.first_row - source.first_row, target.first_column - source.first_column
    found = []
    for r in whole:
        top, bottom = max(r.first_row, source.first_row), min(r.last_row, source.last_row)
        left, end = max(r.first_column, source.first_column), min(r.last_column, source.last_column)
        if top < bottom and left < end:
            found.append(Rectangle(top + down, bottom + down, left + right, end + right))
    return found


def _signed(values: np.ndarray) -> np.ndarray:
    return values.view(np.int16 if values.itemsize == 2 else np.int32)
