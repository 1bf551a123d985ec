"""Find the values that an update of the weights changes, without a copy of the old weights.

After an optimizer's step, and before its float32 values are copied into the bfloat16 ones, a
trainer rank has the new weights (float32) and the old ones (bfloat16). `Comparison.compare` finds
the values that differ. On a GPU two kernels compare and compact them
(rose/transfer/delta_triton.py). Only positions and differences, 6 bytes a change, go to the host,
through page-locked memory on a stream of their own. On a CPU the codec's own loop compares.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from rose.transfer import codec
from rose.transfer.live import unsigned

Moves = tuple[np.ndarray, np.ndarray]  # ascending positions (c,) int32, differences (c,) int16

# Windows are the unit of work: on a GPU of at most this many changes, in 24 MiB, and on a CPU of
# this many values.
WINDOW = 2**22
ROOM = WINDOW  # changes for which a window's page-locked memory has room
# Most windows that keep page-locked memory, 24 MiB each, from step to step. The changes of a
# quarter of 7B take 5. Further windows are copied to other memory.
LOCKED = 16
# Most windows that wait on the device for their copy to the host. This bounds the memory there.
WAITING = 4
# Most values from the first to the last one of a window, so that their positions are int32.
SPAN = 2**30
LARGEST = 2**31 - 1  # largest int32


Locked = tuple[Tensor, ...]  # page-locked memory for positions and differences


class _Window(NamedTuple):
    base: int  # the group's value from which the positions count
    moves: Moves


class Comparison:
    """The changes of all groups of values since `clear`. A group is a flat partition: (n,) float32
    and (n,) bfloat16, both on `device`. `threads`: number of threads that compare on a CPU."""

    def __init__(self, device: torch.device, threads: int):
        self._device, self._threads = device, threads
        self._stream: torch.cuda.Stream | None = None
        self._copier = ThreadPoolExecutor(1, "changes")
        # Page-locked memory of windows: unused, and used by the windows of `_found`.
        self._free: list[Locked] = []
        self._taken: list[Locked] = []
        # For each group, the windows of each comparison.
        self._found: dict[int, list[list[Future[_Window]]]] = {}

    def clear(self) -> None:
        """Forget all changes. No array that `changes` returned may be used after that."""
        for windows in itertools.chain.from_iterable(self._found.values()):
            wait(windows)
        self._found = {}
        self._free, self._taken = self._free + self._taken, []

    def compare(self, group: int, master: Tensor, held: Tensor) -> None:
        """Add the changes from `held` to `master`, rounded to bfloat16. On a GPU the changes arrive
        in the background; later work of the current stream may already write to `held`."""
        on_gpu = self._device.type == "cuda"
        windows = self._compare_on_device if on_gpu else self._compare_on_host
        found = windows(master.detach(), held.detach().view(torch.int16))
        self._found.setdefault(group, []).append(found)

    def changes(self, group: int, begin: int, end: int) -> Moves:
        """Return the changes of a group's values from `begin` to `end`, with positions counted from
        `begin`. Waits for changes that are not on the host yet. Thread-safe."""
        found = [self._between(windows, begin, end) for windows in self._found.get(group, [])]
        if len(found) == 1:
            return found[0]
        positions, differences = _joined(found)
        return codec.summed(positions, differences, 2)

    def _between(self, windows: Sequence[Future[_Window]], begin: int, end: int) -> Moves:
        """Return the changes of one comparison from value `begin` to `end` of its group."""
        parts = []
        for future in windows:
            base, (positions, differences) = future.result()
            if not len(positions) or base >= end or base + int(positions[-1]) < begin:
                continue
            limits = max(begin - base, 0), min(end - base, LARGEST)
            # int32, because for other types NumPy would convert all positions at each call.
            low, high = (int(np.searchsorted(positions, np.int32(limit))) for limit in limits)
            if low < high:
                offset = np.int32(base - begin)
                parts.append((positions[low:high] + offset, differences[low:high]))
        return parts[0] if len(parts) == 1 else _joined(parts)

    def _compare_on_host(self, master: Tensor, held: Tensor) -> list[Future[_Window]]:
        old = unsigned(held)

        def compared(base: int) -> _Window:
            part = master[base : base + WINDOW].bfloat16().view(torch.int16)
            moves = codec.differences(unsigned(part), old[base : base + WINDOW])
            return _Window(base, moves)

        with ThreadPoolExecutor(self._threads, "changes") as pool:
            return [pool.submit(compared, base) for base in range(0, len(old), WINDOW)]

    def _compare_on_device(self, master: Tensor, held: Tensor) -> list[Future[_Window]]:
        from rose.transfer import delta_triton  # Only torch for GPUs comes with Triton.

        there = delta_triton.compare(master, held).cumsum(0)
        ends = there.cpu().numpy()  # the only wait for the device
        found: list[Future[_Window]] = []
        for first, last in windows_of(ends, delta_triton.TILE):
            counts = int(ends[first - 1]) if first else 0, int(ends[last - 1])
            if len(found) >= WAITING:
                found[-WAITING].result()
            moves = delta_triton.compact(master, held, there, (first, last), counts)
            ready = torch.cuda.Event()
            ready.record()
            base = first * delta_triton.TILE
            found.append(self._copier.submit(self._copied, base, moves, ready))
        return found

    def _copied(self, base: int, moves: tuple[Tensor, Tensor], ready: torch.cuda.Event) -> _Window:
        """Copy a window to the host. Runs in a thread, which must not stay on device 0: torch would
        create a CUDA context there."""
        torch.cuda.set_device(self._device)
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)
        if self._free:
            pair = self._free.pop()
        else:
            pair = tuple(torch.empty(ROOM, dtype=m.dtype, pin_memory=True) for m in moves)
        count = len(moves[0])
        with torch.cuda.stream(self._stream):
            ready.wait()
            for locked, part in zip(pair, moves, strict=True):
                locked[:count].copy_(part, non_blocking=True)
        self._stream.synchronize()
        positions, differences = (locked[:count].numpy() for locked in pair)
        if len(self._taken) < LOCKED:
            self._taken.append(pair)
            return _Window(base, (positions, differences))
        self._free.append(pair)
        return _Window(base, (positions.copy(), differences.copy()))


def windows_of(ends: np.ndarray, tile: int) -> list[tuple[int, int]]:
    """Cut tiles into windows of at most `WINDOW` changes and `SPAN` values, but one tile at least.
    `ends` (tiles,) is the running sum of their changes. Return each window's (first, end) tile."""
    found, first = [], 0
    while first < len(ends):
        before = int(ends[first - 1]) if first else 0
        last = int(np.searchsorted(ends, before + WINDOW, side="right"))
        last = max(first + 1, min(last, first + SPAN // tile, len(ends)))
        found.append((first, last))
        first = last
    return found


def in_band(moves: Moves, start: int, columns: int, first: int, last: int) -> Moves:
    """Return the changes in the columns from `first` to `last` of a matrix with `columns` columns.
    Positions in `moves` count from index `start` of the matrix; returned ones count only values in
    these columns."""
    positions, differences = moves
    row, column = np.divmod(positions.astype(np.int64) + start, columns)
    inside = (column >= first) & (column < last)
    begin, offset = divmod(start, columns)
    before = begin * (last - first) + min(max(offset - first, 0), last - first)
    at = row[inside] * (last - first) + (column[inside] - first - before)
    return at.astype(np.int32), differences[inside]


def _joined(parts: Sequence[Moves]) -> Moves:
    if not parts:
        return np.empty(0, np.int32), np.empty(0, np.int16)
    positions, differences = (np.concatenate(part) for part in zip(*parts, strict=True))
    return positions, differences
