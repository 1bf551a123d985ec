"""Bring live weights from one version to another: stage while they are in use, flip when they are not.

Staging reads the live weights, never writes them: block by block it applies the route's payloads to a copy, compares
the result's hash with the manifest's, and keeps what must change: indices and values where few do, else the block.
Whatever goes wrong until then leaves the old version as it was. `Staged.flip` only writes, and writes back if it can't
end; `Staged.check` reads what was written again and compares, while it is in use already.

Memory: three blocks per thread, the indices and values (14 bytes per changed bfloat16 value), and `dense_bytes` of
whole blocks at most; blocks beyond that are computed once more by `flip`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
import xxhash

from rose.transfer import codec
from rose.transfer.blocks import Rectangle, rectangles, size
from rose.transfer.edge import Edge
from rose.transfer.errors import Corrupted, TransferError
from rose.transfer.store import Plan

BATCH_BYTES = 32 * 2**20  # of blocks, whose payloads are fetched at once
BATCH_BLOCKS = 256
DENSE = 1 / 4  # share of changed values from which a block is kept whole: an index takes 8 bytes, two values 4
TYPES = (torch.bfloat16, torch.float32, torch.int16, torch.int32)
PATTERNS = {2: torch.int16, 4: torch.int32}


class WrongBase(TransferError):
    """The live weights are not the version that they were said to be."""


class Place(NamedTuple):
    """Where a block lies in a live parameter: `rectangles` of the parameter's (rows, columns) matrix, in order."""

    parameter: str
    rectangles: list[Rectangle]


def check_type(name: str, tensor: torch.Tensor) -> None:
    """Raises `TransferError` for a parameter of a type that no version has."""
    if tensor.dtype not in TYPES:
        raise TransferError(f"live parameter {name} is {tensor.dtype}: versions are in bfloat16 or float32, and a "
                            "quantised engine can't be brought to them; start it with the unquantised model, without "
                            "rollout.engine_args.quantization")


class Live:
    """The live parameters of one engine rank as integer matrices.

    `parameters`: name -> contiguous tensor of any device, (rows, ...) of bfloat16 or float32.
    """

    def __init__(self, parameters: Mapping[str, torch.Tensor]):
        self.matrices = {}
        devices = {tensor.device for tensor in parameters.values() if tensor.device.type == "cuda"}
        self._aside = torch.cuda.Stream(devices.pop()) if devices else None
        for name, tensor in parameters.items():
            check_type(name, tensor)
            if not tensor.is_contiguous():
                raise TransferError(f"live parameter {name} is not contiguous in memory")
            patterns = tensor.detach().view(PATTERNS[tensor.element_size()])
            self.matrices[name] = patterns.view(patterns.shape[0] if patterns.dim() else 1, -1)

    def aside(self):
        """Context in which copies from and to a GPU don't wait for what the engine computes there. Leaving it does not
        wait for them: `settle` does."""
        return nullcontext() if self._aside is None else torch.cuda.stream(self._aside)

    def settle(self) -> None:
        if self._aside is not None:
            self._aside.synchronize()

    def read(self, place: Place) -> np.ndarray:
        """(n,) uint16 or uint32 patterns, a copy in host memory."""
        matrix, at = self.matrices[place.parameter], 0
        out = torch.empty(sum(r.size for r in place.rectangles), dtype=matrix.dtype)
        for r in place.rectangles:
            part = matrix[r.first_row:r.last_row, r.first_column:r.last_column]
            out[at:at + r.size].view(part.shape).copy_(part)
            at += r.size
        array = out.numpy()
        return array.view(np.uint16 if array.itemsize == 2 else np.uint32)

    def write(self, place: Place, values: torch.Tensor) -> None:
        """`values` (n,) patterns, on the parameter's device or the host."""
        matrix, at = self.matrices[place.parameter], 0
        for r in place.rectangles:
            target = matrix[r.first_row:r.last_row, r.first_column:r.last_column]
            target.copy_(values[at:at + r.size].view(target.shape))
            at += r.size

    def indices(self, place: Place, positions: np.ndarray) -> np.ndarray:
        """Positions (c,) within a block -> flat indices (c,) int64 within the parameter."""
        columns = self.matrices[place.parameter].shape[1]
        out, at = np.empty(len(positions), np.int64), 0
        ends = np.searchsorted(positions, np.cumsum([r.size for r in place.rectangles]))
        low = 0
        for r, high in zip(place.rectangles, ends.tolist()):
            if (r.first_column, r.last_column) == (0, columns):  # whole rows: a run of the parameter
                out[low:high] = positions[low:high] + (r.first_row * columns - at)
            else:
                row, column = np.divmod(positions[low:high].astype(np.int64) - at, r.last_column - r.first_column)
                out[low:high] = (row + r.first_row) * columns + column + r.first_column
            at, low = at + r.size, high
        return out


@dataclass
class _Sparse:
    """What changes of one parameter, by flat index."""

    indices: list = field(default_factory=list)
    new: list = field(default_factory=list)
    old: list = field(default_factory=list)


class Staged:
    """Made by `stage`: everything that a flip needs, verified."""

    def __init__(self, live: Live, places: Mapping[int, Place], again: Callable[[int], np.ndarray], threads: int):
        self._live, self._places, self._again, self._threads = live, places, again, threads
        self._sparse: dict[str, _Sparse] = {}
        self._scatter: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]] = []
        self._dense: dict[int, torch.Tensor] = {}
        self._late: list[int] = []
        self._hashes: dict[int, np.ndarray] = {}  # of dense and late blocks: xxh3-128 after the flip
        self._lock = threading.Lock()
        self.blocks = 0  # that change
        self.changed = 0  # values
        self.nbytes = 0  # of payloads read
        self.route: list[str] = []  # names of the edges
        self.mirrored = 0  # of them, read from a mirror
        self.dense_bytes = 0

    def _keep(self, block: int, old: np.ndarray | None, new: np.ndarray | None, wanted: np.ndarray, dense_bytes: int,
              nbytes: int) -> None:
        """`new` is null if nothing changes."""
        where = np.flatnonzero(old != new) if new is not None else ()
        if not len(where):
            with self._lock:
                self.nbytes += nbytes
            return
        place = self._places[block]
        sparse = len(where) < DENSE * len(new)
        indices = self._live.indices(place, where) if sparse else None
        with self._lock:
            self.nbytes += nbytes
            self.blocks += 1
            self.changed += len(where)
            if sparse:
                kept = self._sparse.setdefault(place.parameter, _Sparse())
                kept.indices.append(indices)
                kept.new.append(_signed(new[where]))
                kept.old.append(_signed(old[where]))
                return
            self._hashes[block] = wanted
            if self.dense_bytes + new.nbytes <= dense_bytes:
                self._dense[block] = torch.from_numpy(_signed(new))
                self.dense_bytes += new.nbytes
            else:
                self._late.append(block)

    @property
    def rereads(self) -> bool:
        """Whether the flip reads payloads once more."""
        return bool(self._late)

    def _upload(self) -> None:
        """Everything to where the parameters are, so that the flip copies nothing over the bus."""
        with self._live.aside():
            for name, kept in self._sparse.items():
                flat = self._live.matrices[name].view(-1)
                self._scatter.append((flat, *(torch.from_numpy(np.concatenate(part)).to(flat.device)
                                              for part in (kept.indices, kept.new, kept.old))))
        self._live.settle()
        self._sparse = dict.fromkeys(self._sparse)  # the names are still wanted
        self._late.sort()

    @torch.no_grad()
    def flip(self) -> None:
        """Nothing may read the live weights meanwhile. Raises `TransferError` when it could not end: with the old
        weights back in place, or, if the text says so, a mixture."""
        done_dense, half, late = [], None, False
        try:
            self._put(lambda flat, indices, new, _: flat.scatter_(0, indices, new))
            for block, values in self._dense.items():
                half = block, torch.from_numpy(_signed(self._live.read(self._places[block])))
                self._live.write(self._places[block], values)
                values.copy_(half[1])
                done_dense.append(block)
                half = None
            for block in self._late:
                values = torch.from_numpy(_signed(self._again(block)))
                late = True
                self._live.write(self._places[block], values)
        except Exception as error:
            try:
                if late:
                    raise error
                self._take_back(done_dense, half)
            except Exception:
                raise TransferError(f"the flip broke off, and the weights are a mixture now: {error}") from error
            raise TransferError(f"the flip broke off, and was taken back: {error}") from error

    def _put(self, write: Callable) -> None:
        """`write(parameter, indices, new, old)` for each parameter. On a CPU single values cost a miss of the cache
        each, so that threads help, and scatter_ takes a quarter to all of the time of `parameter[indices] = new`."""
        if self._threads == 1 or any(flat.is_cuda for flat, *_ in self._scatter):
            for parts in self._scatter:
                write(*parts)
            return
        with ThreadPoolExecutor(self._threads, "flip") as pool:
            for future in [pool.submit(write, *parts) for parts in
                           sorted(self._scatter, key=lambda parts: -len(parts[1]))]:
                future.result()

    def _take_back(self, done_dense: list[int], half: tuple[int, torch.Tensor] | None) -> None:
        if half is not None:  # its values stand in `_dense` as before
            self._live.write(self._places[half[0]], half[1])
        for block in done_dense:
            values = torch.from_numpy(_signed(self._live.read(self._places[block])))
            self._live.write(self._places[block], self._dense[block])
            self._dense[block].copy_(values)
        self._put(lambda flat, indices, _, old: flat.scatter_(0, indices, old))  # also where nothing was written yet

    def check(self) -> None:
        """Read back what the flip wrote. Raises `Corrupted`."""
        with self._live.aside():
            for name, (flat, indices, new, _) in zip(self._sparse, self._scatter, strict=True):
                if wrong := int((flat[indices] != new).sum()):
                    raise Corrupted(f"live parameter {name}: {wrong} of {len(new)} values are not what the flip wrote; "
                                    "the weights are a mixture now")
            for block, wanted in self._hashes.items():
                found = _hash(self._live.read(self._places[block]))
                if (found != wanted).any():
                    raise Corrupted(f"live parameter {self._places[block].parameter}, block {block}: xxh3-128 "
                                    f"{_hex(found)} after the flip, expected {_hex(wanted)}; the weights are a mixture "
                                    "now")


def stage(live: Live, plan: Plan, places: Mapping[int, Place], route: list[Edge], from_live: bool, threads: int,
          dense_bytes: int, tick: Callable[[], None] = lambda: None) -> Staged:
    """Stage the last version of `route`. `from_live`: the first edge builds on the live weights.

    `tick` is called now and then (to renew a lease, or to give up by raising). Raises `Missing` and `Corrupted` with
    the attribute `edge`, the one that failed, and `WrongBase`.
    """
    work = _Work(live, plan, places, route, from_live)
    staged = Staged(live, places, lambda block: next(work.values([block]))[2], threads)

    def run(batch: list[int]) -> None:
        tick()
        with live.aside():
            for block, old, new, wanted, nbytes in work.values(batch, verify=True):
                staged._keep(block, old, new, wanted, dense_bytes, nbytes)

    with ThreadPoolExecutor(threads, "stage") as pool:
        futures = [pool.submit(run, batch) for batch in _batches(plan, sorted(places))]
        try:
            for future in futures:
                future.result()
        finally:
            for future in futures:
                future.cancel()
    staged._upload()
    return staged


class _Work:
    def __init__(self, live: Live, plan: Plan, places: Mapping[int, Place], route: list[Edge], from_live: bool):
        self.live, self.plan, self.places, self.route, self.from_live = live, plan, places, route, from_live

    def values(self, batch: list[int], verify: bool = False) -> Iterator[tuple]:
        """(block, live values, new ones, hash, bytes read), nulls if nothing changes; one block after the other, as a
        batch's values at once would be 64 MiB for each thread."""
        rank = self.plan.blocks[batch[0]].owner
        found = []
        for edge in self.route:
            try:
                found.append(edge.payloads(rank, batch))
            except TransferError as error:
                error.edge = edge
                raise
        for block in batch:
            steps = [(edge, *part[block]) for edge, part in zip(self.route, found) if block in part]
            yield block, *self._block(block, steps, verify)

    def _block(self, block: int, steps: list[tuple], verify: bool) -> tuple:
        nbytes = sum(len(payload) for _, _, payload in steps)
        first = next((i for i in reversed(range(len(steps))) if not codec.info(steps[i][2]).needs_base), None)
        if first is None and not self.from_live:
            error = Corrupted(f"{self.route[0].source}/{self.route[0].name}: block {block} is absent from a full edge")
            error.edge = self.route[0]
            raise error
        if not steps:
            return None, None, None, 0
        old = self.live.read(self.places[block])
        new = old.copy() if first is None else None
        try:
            for i, (edge, entry, payload) in enumerate(steps[first or 0:], first or 0):
                if i == first:
                    new = codec.decode(payload)
                    self._fits(block, new, old)
                else:
                    codec.apply(payload, new)
        except ValueError as error:
            damaged = Corrupted(f"{edge.source}/{edge.name}: block {block}: {error}")
            damaged.edge = edge
            raise damaged from None
        wanted = steps[-1][1]["new"]
        if verify and (_hash(new) != wanted).any():
            raise self._mismatch(block, steps, first, old, new)
        return old, new, wanted, nbytes

    def _fits(self, block: int, new: np.ndarray, old: np.ndarray) -> None:
        if new.dtype.itemsize != old.dtype.itemsize or len(new) != len(old):
            raise ValueError(f"{len(new)} values of {new.itemsize} bytes, the block has {len(old)} of {old.itemsize}")

    def _mismatch(self, block: int, steps: list[tuple], first: int | None, old: np.ndarray, new: np.ndarray):
        edge, entry, _ = steps[-1]
        if first is None and (_hash(old) != steps[0][1]["old"]).any():
            name = self.plan.tensors[self.plan.blocks[block].tensor].name
            return WrongBase(f"{steps[0][0].name} builds on other weights than the live ones: block {block} of {name} "
                             f"has xxh3-128 {_hex(_hash(old))}, expected {_hex(steps[0][1]['old'])}")
        error = Corrupted(f"{edge.source}/{edge.name}: block {block} has xxh3-128 {_hex(_hash(new))}, the table says "
                          f"{_hex(entry['new'])}")
        error.edge = edge
        return error


def _batches(plan: Plan, blocks: list[int]) -> list[list[int]]:
    """Neighbours of one owner."""
    by_owner: dict[int, list[int]] = {}
    for block in blocks:
        by_owner.setdefault(plan.blocks[block].owner, []).append(block)
    batches: list[list[int]] = []
    for mine in by_owner.values():
        held = BATCH_BYTES
        for block in mine:
            nbytes = size(plan.blocks[block], plan.tensors[plan.blocks[block].tensor].columns) \
                * plan.width(block).itemsize
            if held + nbytes > BATCH_BYTES or len(batches[-1]) == BATCH_BLOCKS:
                batches.append([])
                held = 0
            batches[-1].append(block)
            held += nbytes
    return batches


def place_blocks(plan: Plan, slices: Callable[[str, tuple[int, ...]], object],
                 live: Live) -> tuple[dict[int, Place], dict[str, int]]:
    """Where each block lies in the live parameters (those that other ranks hold are left out), and how many values of
    each parameter the blocks fill.

    `slices(name, shape)`: `rose.engine.layout.LocalSlice` or null. Raises `TransferError` when a tensor doesn't fit,
    or a block lies half in this rank's part.
    """
    places: dict[int, Place] = {}
    filled = dict.fromkeys(live.matrices, 0)
    local = {}
    for number, tensor in enumerate(plan.tensors):
        try:
            local[number] = slices(tensor.name, tuple(tensor.shape))
        except ValueError as error:
            raise TransferError(str(error)) from None
        if local[number] is not None:
            _check_fit(tensor, local[number], live)
    for number, block in enumerate(plan.blocks):
        place = local[block.tensor]
        if place is None:
            continue
        tensor = plan.tensors[block.tensor]
        found = _shift(block, tensor, place)
        if found is None:
            continue
        if sum(r.size for r in found) != size(block, tensor.columns):
            raise TransferError(f"block {number} of {tensor.name} lies half in this engine's part: the trainer cut it "
                                "for other tensor-parallel degrees; add this engine's to transfer.tensor_parallel")
        places[number] = Place(place.parameter, found)
        filled[place.parameter] += sum(r.size for r in found)
    return places, filled


def _bounds(place, shape: tuple[int, ...]) -> tuple[Rectangle, Rectangle]:
    """Source and destination of a slice as rectangles of matrices."""
    columns = 1
    for extent in shape[1:]:
        columns *= extent

    def rectangle(slices: tuple[slice, ...]) -> Rectangle:
        if len(slices) == 1:
            return Rectangle(slices[0].start, slices[0].stop, 0, 1)
        return Rectangle(slices[0].start, slices[0].stop, slices[1].start, slices[1].stop)

    return rectangle(place.source), rectangle(place.destination)


def _check_fit(tensor, place, live: Live) -> None:
    source, destination = _bounds(place, tensor.shape)
    matrix = live.matrices.get(place.parameter)
    if matrix is None or destination.last_row > matrix.shape[0] or destination.last_column > matrix.shape[1]:
        raise TransferError(f"tensor {tensor.name!r} {tuple(tensor.shape)} doesn't fit the engine's parameter "
                            f"{place.parameter} {tuple(matrix.shape) if matrix is not None else '(absent)'}")
    width = {"bfloat16": 2, "float32": 4}[tensor.dtype]
    if matrix.element_size() != width:
        raise TransferError(f"tensor {tensor.name!r} is {tensor.dtype}, the engine's parameter {place.parameter} has "
                            f"{matrix.element_size()} bytes a value; the engine must run in model.dtype")


def _shift(block, tensor, place) -> list[Rectangle] | None:
    """The part of the block that lies in the slice, in the parameter's coordinates; null if none does."""
    source, destination = _bounds(place, tensor.shape)
    down, right = destination.first_row - source.first_row, destination.first_column - source.first_column
    found = []
    for r in rectangles(block, tensor.columns):
        part = Rectangle(max(r.first_row, source.first_row), min(r.last_row, source.last_row),
                         max(r.first_column, source.first_column), min(r.last_column, source.last_column))
        if part.first_row < part.last_row and part.first_column < part.last_column:
            found.append(Rectangle(part.first_row + down, part.last_row + down,
                                   part.first_column + right, part.last_column + right))
    return found or None


def _signed(values: np.ndarray) -> np.ndarray:
    return values.view(np.int16 if values.itemsize == 2 else np.int32)


def _hash(values: np.ndarray) -> np.ndarray:
    """(16,) uint8: xxh3-128 of the patterns' little-endian bytes."""
    return np.frombuffer(xxhash.xxh3_128_digest(values.data.cast("B")), np.uint8)


def _hex(digest: np.ndarray) -> str:
    return digest.tobytes().hex()

