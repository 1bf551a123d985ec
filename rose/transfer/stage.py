"""Bring live weights from one version to another: stage while they are in use, flip when they are
not.

Staging reads the live weights, never writes them: block by block it makes the new values of the
route's payloads and keeps what must change: indices and values where few do, else the block. A
block is either compared whole - the live one read, the payloads applied to the copy, the result's
hash compared with the manifest's - or, where its hash is known, by an earlier comparison that is
trusted (`compared`) or from a GPU that hashes what it has (rose/transfer/digests.py), only its
changing values are read, and an unchanged one is not read at all. Whatever goes wrong until then
leaves the old version as it was. `Staged.flip` only writes, and writes back if it can't end;
`Staged.check` reads what was written again and compares, while it is in use already: values, or,
where a GPU hashes, the changed blocks whole.

Host memory: three blocks per thread, 8 bytes per changed bfloat16 value (of which 2 are left once
the rest is on the device), and `dense_bytes` of whole blocks at most; blocks beyond that are
computed once more by `flip`. Device memory: rose/transfer/changes.py, and a block while it is read
or written.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import xxhash

from rose.transfer import codec
from rose.transfer.base import Base
from rose.transfer.blocks import Rectangle, Tensor, rectangles, size
from rose.transfer.changes import Changes, budget, values_per_thread
from rose.transfer.digests import digests, hashes_on_device
from rose.transfer.edge import Edge
from rose.transfer.errors import Corrupted, TransferError
from rose.transfer.live import Live, Place
from rose.transfer.store import WIDTHS, Plan

BATCH_BYTES = 32 * 2**20  # of blocks, whose payloads are fetched at once
BATCH_BLOCKS = 256
# Share of changed values from which a block is kept whole: on the host an index and two values take
# 8 bytes, the block's new value 2; on the device 6 and 2.
DENSE = 1 / 4
NOTHING = np.empty(0, np.uint16)


class WrongBase(TransferError):
    """The live weights are not the version that they were said to be."""


class _Change(NamedTuple):
    """Of a block: positions (c,) int32 that change, their old and new patterns (c,); all new
    patterns (n,), where they were made; how many there are; the block's hash afterwards; bytes of
    payloads read."""

    block: int
    positions: np.ndarray
    old: np.ndarray
    new: np.ndarray
    whole: np.ndarray | None
    values: int
    wanted: np.ndarray
    nbytes: int


class Staged:
    """Made by `stage`: everything that a flip needs, verified."""

    def __init__(
        self, live: Live, places: Mapping[int, Place], threads: int, work: _Work | None = None
    ):
        self._live, self._places, self._work, self._threads = live, places, work, threads
        self.changes = Changes(live, threads)
        self._dense: dict[int, torch.Tensor] = {}
        self._late: list[int] = []
        # after the flip, of dense and late blocks, and of those of which single values change
        self._hashes: dict[int, np.ndarray] = {}
        self._sparse_hashes: dict[int, np.ndarray] = {}
        self._lock = threading.Lock()
        self.digests: dict[int, bytes] = {}  # block -> xxh3-128 after the flip, as the route says
        self.changed = 0  # values
        self.nbytes = 0  # of payloads read
        self.route: list[str] = []  # names of the edges
        self.mirrored = 0  # of them, read from a mirror
        self.dense_bytes = 0

    def _keep(self, change: _Change, dense_bytes: int) -> None:
        count = len(change.positions)
        place = self._places[change.block]
        sparse = count < DENSE * change.values
        indices = self._live.indices(place, change.positions) if sparse and count else None
        with self._lock:
            self.nbytes += change.nbytes
            self.digests[change.block] = change.wanted.tobytes()
            if not count:
                return
            self.changed += count
            if sparse:
                self._sparse_hashes[change.block] = change.wanted
                self.changes.add(place.parameter, indices, _signed(change.new), _signed(change.old))
                return
            self._hashes[change.block] = change.wanted
            if self.dense_bytes + change.whole.nbytes <= dense_bytes:
                self._dense[change.block] = torch.from_numpy(_signed(change.whole))
                self.dense_bytes += change.whole.nbytes
            else:
                self._late.append(change.block)

    def _upload(self, device_bytes: int | None) -> None:
        """What finds room to where the parameters are, so that the flip copies less over the
        bus."""
        with self._live.side_stream():
            self.changes.upload(budget(self._live, device_bytes))
        self._live.synchronize()
        self._late.sort()

    @torch.no_grad()
    def flip(self) -> None:
        """Nothing may read the live weights meanwhile. Raises `TransferError` when it could not
        end: with the old weights back in place, or, if the text says so, a mixture."""
        done_dense, half, late = [], None, False
        try:
            for edge in self._work.route if self._late else ():  # before a value is touched
                edge.require()
            self.changes.put("new")
            for block, values in self._dense.items():
                half = block, torch.from_numpy(_signed(self._live.read(self._places[block])))
                self._live.write(self._places[block], values)
                values.copy_(half[1])
                done_dense.append(block)
                half = None
            for block in self._late:
                change = next(self._work.changes([block], verify=False))
                values = torch.from_numpy(_signed(change.whole))
                late = True
                self._live.write(self._places[block], values)
        except Exception as error:
            try:
                if late:
                    raise error
                self._take_back(done_dense, half)
            except Exception:
                raise TransferError(
                    f"the flip broke off, and the weights are a mixture now: {error}"
                ) from error
            raise TransferError(f"the flip broke off, and was taken back: {error}") from error

    def _take_back(self, done_dense: list[int], half: tuple[int, torch.Tensor] | None) -> None:
        if half is not None:  # its values stand in `_dense` as before
            self._live.write(self._places[half[0]], half[1])
        for block in done_dense:
            values = torch.from_numpy(_signed(self._live.read(self._places[block])))
            self._live.write(self._places[block], self._dense[block])
            self._dense[block].copy_(values)
        self.changes.put("old")  # also where nothing was written yet

    def check(self) -> None:
        """Read back what the flip wrote. Raises `Corrupted`."""
        with self._live.side_stream():
            self.changes.check()
        hashes = self._hashes | (self._sparse_hashes if hashes_on_device(self._live) else {})
        places = {block: self._places[block] for block in hashes}
        for block, found in digests(self._live, places, self._threads).items():
            if found != (wanted := hashes[block].tobytes()):
                raise Corrupted(
                    f"live parameter {self._places[block].parameter}, block {block}: xxh3-128 "
                    f"{found.hex()} after the flip, expected {wanted.hex()}; the weights are a "
                    "mixture now"
                )

    def release(self) -> None:
        """Give back the device's memory. Nothing can be flipped, taken back or checked
        afterwards."""
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
    compared: Callable[[int], bytes | None] = lambda block: None,
) -> Staged:
    """Stage the last version of `route`. `from_live`: the first edge builds on the live weights.

    `device_bytes`: of the device that may be taken; null: all that is free but a reserve.
    `compared(block)`: the xxh3-128 that the live block had when it was compared, if that is still
    trusted; null: compare it now. `tick` is called now and then, to give up by raising. Raises
    `Missing` and `Corrupted` with the attribute `edge`, the one that failed, and `WrongBase`.
    """
    if from_live and len(route) == 1 and hashes_on_device(live):
        compared = _found_there(live, places, threads, tick, compared)
    at_a_time = values_per_thread(budget(live, device_bytes), threads)
    work = _Work(live, plan, places, route, from_live, compared, at_a_time)
    staged = Staged(live, places, threads, work)

    def run(batch: list[int]) -> None:
        tick()
        with live.side_stream():
            for change in work.changes(batch):
                staged._keep(change, dense_bytes)

    with ThreadPoolExecutor(threads, "stage") as pool:
        futures = [pool.submit(run, batch) for batch in _batches(plan, places)]
        try:
            for future in futures:
                future.result()
        finally:
            for future in futures:
                future.cancel()
    staged._upload(device_bytes)
    return staged


def _found_there(
    live: Live,
    places: Mapping[int, Place],
    threads: int,
    tick: Callable[[], None],
    compared: Callable[[int], bytes | None],
) -> Callable[[int], bytes | None]:
    """`compared`, and where it knows nothing the hash that the block has now."""
    unknown = {block: place for block, place in places.items() if compared(block) is None}
    found = digests(live, unknown, threads, tick)
    return lambda block: found.get(block) or compared(block)


@dataclass(frozen=True)
class _Work:
    live: Live
    plan: Plan
    places: Mapping[int, Place]
    route: list[Edge]
    from_live: bool
    compared: Callable[[int], bytes | None]
    at_a_time: int

    def changes(self, batch: list[int], verify: bool = True) -> Iterator[_Change]:
        """One block after the other, as a batch's values at once would be 64 MiB for each thread.
        Without `verify` every block is made whole, and compared with nothing."""
        rank, found = self.plan.blocks[batch[0]].owner, []
        for edge in self.route:
            try:
                found.append(edge.payloads(rank, batch))
            except TransferError as error:
                error.edge = edge
                raise
        for block in batch:
            steps = [(edge, *part[block]) for edge, part in zip(self.route, found, strict=True)]
            yield (self._few(block, steps) if verify else None) or self._block(block, steps, verify)

    def _few(self, block: int, steps: list[tuple]) -> _Change | None:
        """By the changing values alone: of one difference on a block whose hash is known to be that
        of its base."""
        if len(steps) != 1:
            return None
        edge, entry, payload = steps[0]
        place = self.places[block]
        width = self.live.matrices[place.parameter].element_size()
        try:
            if self.compared(block) != entry["old"].tobytes():
                return None
            info = codec.info(payload)
            if (
                not info.needs_base
                or (info.values, info.width) != (place.size, width)
                or info.changed >= DENSE * info.values
            ):
                return None
            at, differences = codec.changes(payload)
        except ValueError as error:
            raise _damaged(edge, block, str(error)) from None
        old = self.live.read_at(place, at, self.at_a_time) if len(at) else NOTHING
        new = codec.moved(old, differences)
        return _Change(block, at, old, new, None, info.values, entry["new"], len(payload))

    def _block(self, block: int, steps: list[tuple], verify: bool) -> _Change:
        nbytes = sum(len(payload) for _, _, payload in steps)
        old = self.live.read(self.places[block])
        new, base = old.copy(), self.from_live
        for edge, _, payload in steps:
            try:
                if not base and codec.info(payload).needs_base:
                    raise ValueError("it needs a base, and is of a full version")
                codec.apply(payload, new)
            except ValueError as error:
                raise _damaged(edge, block, str(error)) from None
            base = True
        wanted = steps[-1][1]["new"]
        if not verify:
            return _Change(block, NOTHING, NOTHING, NOTHING, new, len(new), wanted, nbytes)
        if (_hash(new) != wanted).any():
            raise self._mismatch(block, steps, old, new)
        where = np.flatnonzero(old != new).astype(np.int32)
        return _Change(block, where, old[where], new[where], new, len(new), wanted, nbytes)

    def _mismatch(self, block: int, steps: list[tuple], old: np.ndarray, new: np.ndarray):
        needs_base = all(codec.info(payload).needs_base for _, _, payload in steps)
        if needs_base and (_hash(old) != steps[0][1]["old"]).any():
            name = self.plan.tensors[self.plan.blocks[block].tensor].name
            return WrongBase(
                f"{steps[0][0].name} builds on other weights than the live ones: block {block} of "
                f"{name} has xxh3-128 {_hex(_hash(old))}, expected {_hex(steps[0][1]['old'])}"
            )
        edge, entry, _ = steps[-1]
        text = f"its xxh3-128 is {_hex(_hash(new))}, the table says {_hex(entry['new'])}"
        return _damaged(edge, block, text)


def _damaged(edge: Edge, block: int, why: str) -> Corrupted:
    damaged = Corrupted(f"{edge.source}/{edge.name}: block {block}: {why}")
    damaged.edge = edge
    return damaged


def _batches(plan: Plan, blocks: Iterable[int]) -> list[list[int]]:
    """Neighbours of one owner."""
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
    """Where each block lies in the live parameters (those that other ranks hold are left out), and
    how many values of each parameter the blocks fill.

    `slices(name, shape)`: `rose.engine.layout.LocalSlice` or null. Raises `TransferError` when a
    tensor doesn't fit, or a block lies half in this rank's part.
    """
    places: dict[int, Place] = {}
    filled = dict.fromkeys(live.matrices, 0)
    local = {}
    for number, tensor in enumerate(plan.tensors):
        try:
            found = slices(tensor.name, tuple(tensor.shape))
        except ValueError as error:
            raise TransferError(str(error)) from None
        if found is not None:
            part = found.parameter, _rectangle(found.source), _rectangle(found.destination)
            local[number] = part
            _check_fit(tensor, found.parameter, part[2], live)
    for number, block in enumerate(plan.blocks):
        if block.tensor not in local:
            continue
        tensor, (parameter, source, target) = plan.tensors[block.tensor], local[block.tensor]
        place = Place(parameter, _shift(rectangles(block, tensor.columns), source, target))
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


def _rectangle(slices: tuple[slice, ...]) -> Rectangle:
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


def _shift(whole: list[Rectangle], source: Rectangle, target: Rectangle) -> list[Rectangle]:
    """What of `whole` lies in `source`, in the coordinates of the parameter, where that is
    `target`."""
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


def _hash(values: np.ndarray) -> np.ndarray:
    """(16,) uint8: xxh3-128 of the patterns' little-endian bytes."""
    return np.frombuffer(xxhash.xxh3_128_digest(values.data.cast("B")), np.uint8)


def _hex(digest: np.ndarray) -> str:
    return digest.tobytes().hex()
