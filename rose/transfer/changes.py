"""Change single values of the live weights, where they are, by adding differences.

For each value that a version changes, its index and its difference in the order of the floats
(rose/transfer/payload.py) are kept. At the flip, the pause in which a staged version becomes the
live one, `put(1)` adds the differences. `put(-1)` subtracts them if the flip fails, so no copy of
the old values is kept. On a GPU a kernel adds (rose/transfer/delta_triton.py).

Before the flip, as many values as fit are copied to the device. A bfloat16 value takes 6 bytes
there, 4 of them for its index. The others are copied during the flip through one small workspace on
the device. That makes the pause longer, but no version is too large for the device. All device
memory is allocated before the flip, so that the flip can't run out of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rose.transfer import codec
from rose.transfer.errors import TransferError
from rose.transfer.live import Live, unsigned

PIECE = 2**20  # most values of a piece, which is moved in one call
VALUE_BYTES = 8 + 4  # bytes of the workspace for one value: the longest index and difference
# Bytes of the device that staging leaves free, because an engine's activations grow with batches.
RESERVE_BYTES = 512 * 2**20
# Bytes of the device that staging takes even if that leaves less than the reserve.
MIN_BYTES = 32 * 2**20
# From this size on, released memory is returned to the device and not kept by torch's allocator.
LARGE_BYTES = 256 * 2**20
ALIGNMENT = 16  # bytes; the kernel is compiled for arrays that begin at such addresses

Part = tuple[np.ndarray, np.ndarray]  # indices (n,) and differences (n,)


def budget(live: Live, most: int | None) -> int | None:
    """Return the bytes of the device that staging may take now: `most`, or less if less is free.
    Returns `most` for parameters in host memory, to which nothing needs to be copied."""
    if live.device.type != "cuda":
        return most
    free = torch.cuda.mem_get_info(live.device)[0] - RESERVE_BYTES
    return max(MIN_BYTES, free if most is None else min(free, most))


@dataclass
class _Piece:
    """Some changes of one parameter, `count` in all. They are in `parts` on the host, or in
    `resident` (indices and differences) on the device."""

    parameter: str
    parts: list[Part]
    count: int
    resident: tuple[Tensor, Tensor] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the piece on a device."""
        return sum(_aligned(self.count * array.itemsize) for array in self.parts[0])


class Changes:
    """The changed values of one version. The calls are, in order: `add` for each block, `upload`
    once, `put(1)` to add the differences and `put(-1)` to subtract those that were added, and
    `release`."""

    def __init__(self, live: Live, threads: int):
        self._live, self._threads = live, threads
        self._added: dict[str, list[Part]] = {}
        self._workspace: Tensor | None = None  # (bytes,) uint8; None if nothing goes to a device
        self._bounce: Any = None  # a `_Bounce`, if there is a workspace
        self._put: list[_Piece] = []  # pieces whose differences were added
        self.pieces: list[_Piece] = []
        self.device_bytes = 0

    def add(self, parameter: str, indices: np.ndarray, differences: np.ndarray) -> None:
        """Add changes: flat indices (n,) of the parameter, int32 or int64, and differences (n,),
        int16 for bfloat16 and int32 for float32."""
        self._added.setdefault(parameter, []).append((indices, differences))

    def upload(self, most: int | None) -> None:
        """Allocate at most `most` bytes of the device (see `budget`), and copy the changes there
        that fit. Raises `TransferError` if the device can't give even `MIN_BYTES`."""
        if most is None or not self._added:
            self.pieces = list(self._cut(PIECE))
            # Each piece becomes one part, so that the flip takes fewer calls.
            for piece in self.pieces:
                indices, differences = zip(*piece.parts, strict=True)
                piece.parts = [(np.concatenate(indices), np.concatenate(differences))]
        else:
            memory = self._allocate(most)
            self._bounce, at = _Bounce(self.pieces, self._live), 0
            for piece in self.pieces:
                if (end := at + piece.nbytes) <= memory.numel():
                    piece.resident, at = self._bounce.copy(piece, memory[at:end]), end
                self._compile(piece)
                if piece.resident:
                    piece.parts = []
        self._added = {}

    def _allocate(self, most: int) -> Tensor:
        """Cut the changes into pieces, and allocate a workspace for one piece, of at most a quarter
        of `most`. Return memory for resident pieces."""
        while True:
            values = max(1, min(PIECE, (most // 4 - 2 * ALIGNMENT) // VALUE_BYTES))
            self.pieces = list(self._cut(values))
            workspace = max(piece.nbytes for piece in self.pieces)
            wanted = sum(piece.nbytes for piece in self.pieces)
            there = {"dtype": torch.uint8, "device": self._live.device}
            try:
                self._workspace = torch.empty(workspace, **there)
                memory = torch.empty(max(0, min(wanted, most - workspace)), **there)
                self.device_bytes = workspace + memory.numel()
                return memory
            except torch.OutOfMemoryError as error:
                self._workspace = None
                torch.cuda.empty_cache()
                if most <= MIN_BYTES:
                    raise TransferError(
                        f"staging a version needs {MIN_BYTES / 2**20:g} MiB of "
                        f"{self._live.device}, which has not even those: lower "
                        f"rollout.gpu_memory_utilization or rollout.kv_cache_gib ({error})"
                    ) from error
                most = max(MIN_BYTES, most // 4)

    def _cut(self, values: int) -> Iterator[_Piece]:
        """Yield pieces of at most `values` values."""
        for parameter in sorted(self._added):
            parts: list[Part] = []
            count = 0
            for indices, differences in self._added[parameter]:
                low = 0
                while low < len(indices):
                    high = min(len(indices), low + values - count)
                    parts.append((indices[low:high], differences[low:high]))
                    count, low = count + high - low, high
                    if count == values:
                        yield _Piece(parameter, parts, count)
                        parts, count = [], 0
            if count:
                yield _Piece(parameter, parts, count)

    # ----------------------------------------------------------------- the live parameters

    def put(self, sign: int) -> None:
        """Add the differences (`sign` 1), or subtract those that were added (-1). On a CPU each
        value costs a cache miss, so several threads are faster."""
        pieces, self._put = (self.pieces, []) if sign > 0 else (self._put, [])

        def work(piece: _Piece) -> None:
            self._move(piece, sign)
            if sign > 0:
                self._put.append(piece)

        if self._threads == 1 or self._workspace is not None:
            for piece in pieces:
                work(piece)
            return
        with ThreadPoolExecutor(self._threads, "flip") as pool:
            for future in [pool.submit(work, piece) for piece in pieces]:
                future.result()

    def release(self) -> None:
        """Drop all changes and free their memory."""
        large = self.device_bytes > LARGE_BYTES
        self.pieces, self._put, self.device_bytes = [], [], 0
        self._workspace = self._bounce = None
        if large and self._live.device.type == "cuda":
            torch.cuda.empty_cache()  # torch's allocator would keep it for this stream only

    def _move(self, piece: _Piece, sign: int) -> None:
        """Add `sign` times a piece's differences. Raises `ValueError` before any change."""
        flat = self._live.matrices[piece.parameter].view(-1)
        for indices, differences in piece.parts:
            if len(indices) != len(differences):
                raise ValueError(f"{len(indices)} places, {len(differences)} differences")
        if self._workspace is None:
            for indices, differences in piece.parts:
                codec.move(unsigned(flat), indices, differences, sign)
            return
        at, by = piece.resident or self._bounce.copy(piece, self._workspace)
        if self._live.on_gpu:
            from rose.transfer import delta_triton  # Only torch for GPUs comes with Triton.

            delta_triton.move(flat, at, by, sign)
        else:
            codec.move(unsigned(flat), at.numpy(), by.numpy(), sign)

    def _compile(self, piece: _Piece) -> None:
        """Have Triton compile the kernel for this piece, before the pause. Raises
        `TransferError`."""
        flat = self._live.matrices[piece.parameter].view(-1)
        if not self._live.on_gpu:
            return
        try:
            from rose.transfer import delta_triton

            at, by = piece.resident or _views(piece, self._workspace)
            delta_triton.move(flat, at, by, 1, count=0)
        except Exception as error:  # errors of Triton, C compilers and drivers
            raise TransferError(
                f"Triton can't compile for {flat.device}, where live weights are to be changed: "
                f"{type(error).__name__}: {error}"
            ) from error


class _Bounce:
    """Page-locked host memory for any two of `pieces`, through which pieces are copied to a device:
    one piece is filled in while the other is copied."""

    def __init__(self, pieces: list[_Piece], live: Live):
        nbytes, self._next = max(piece.nbytes for piece in pieces), 0
        self._buffers: list[tuple[Tensor, torch.cuda.Event | None]] = []
        for _ in range(2):
            if live.device.type == "cuda":
                locked = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
                self._buffers.append((locked, torch.cuda.Event()))
            else:
                self._buffers.append((torch.from_numpy(np.empty(nbytes, np.uint8)), None))

    def copy(self, piece: _Piece, target: Tensor) -> tuple[Tensor, Tensor]:
        """Copy a piece's parts into `target` (bytes,) uint8, in the current stream, and return its
        indices and differences there."""
        buffer, copied = self._buffers[self._next]
        self._next = 1 - self._next
        if copied is not None:
            copied.synchronize()  # returns at once before the first copy
        views = _views(piece, buffer)
        for i, view in enumerate(views):
            np.concatenate([part[i] for part in piece.parts], out=view.numpy())
        target[: piece.nbytes].copy_(buffer[: piece.nbytes], non_blocking=True)
        if copied is not None:
            copied.record()
        return _views(piece, target)


def _views(piece: _Piece, memory: Tensor) -> tuple[Tensor, Tensor]:
    """Return memory (bytes,) uint8 as a piece's indices (n,) and differences (n,)."""
    found, at = [], 0
    for array in piece.parts[0]:
        dtype = torch.from_numpy(array[:0]).dtype
        found.append(memory[at : at + piece.count * array.itemsize].view(dtype))
        at += _aligned(piece.count * array.itemsize)
    return found[0], found[1]


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
