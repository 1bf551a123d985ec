"""Write the single values that a version changes from the host into parameters on a device.

Before the flip, as many values as fit are copied to the device: 6 bytes for a bfloat16 value, an
index of 4 and the new value. The others are copied during the flip through one small workspace on
the device. That makes the pause longer, but no version is too large for the device. Old values
stay on the host, because only a failed flip needs them. All device memory is allocated before the
flip, so that the flip can't run out of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rose.transfer.errors import Corrupted, TransferError
from rose.transfer.live import Live

PIECE = 2**20  # most values of a piece, which is written or compared in one call
# Bytes of the workspace for one value: torch's index, ours, the new value, the live one, a flag.
VALUE_BYTES = 8 + 8 + 4 + 4 + 1
# Bytes of the device that staging leaves free, because an engine's activations grow with batches.
RESERVE_BYTES = 512 * 2**20
# Bytes of the device that staging takes even if less than the reserve is free.
MIN_BYTES = 32 * 2**20
# From this size on, released memory is returned to the device and not kept by torch's allocator.
LARGE_BYTES = 256 * 2**20


def budget(live: Live, most: int | None) -> int | None:
    """Return the bytes of the device that staging may take now: `most`, or less if less is free;
    `most` for parameters in host memory, to which nothing needs to be copied."""
    if live.device.type != "cuda":
        return most
    free = torch.cuda.mem_get_info(live.device)[0] - RESERVE_BYTES
    return max(MIN_BYTES, free if most is None else min(free, most))


def values_per_thread(nbytes: int | None, threads: int) -> int:
    """Return how many values each of `threads` threads may process at once within `nbytes` of the
    device; `PIECE` if `nbytes` is None, for parameters in host memory."""
    return PIECE if nbytes is None else max(1, min(PIECE // 4, nbytes // (VALUE_BYTES * threads)))


@dataclass
class _Piece:
    """Some changes of one parameter. `indices` (n,) and `new` (n,) are on the device if `resident`,
    else on the host. `old` (n,) is always on the host."""

    parameter: str
    indices: Tensor
    new: Tensor
    old: Tensor
    resident: bool = False


class _Workspace:
    """Device memory to process one piece of at most `values` values."""

    def __init__(self, values: int, device: torch.device):
        self._memory = torch.empty(values * VALUE_BYTES, dtype=torch.uint8, device=device)
        self._ends = [values * end for end in (0, 8, 16, 20, 24, 25)]

    def part(self, number: int, dtype: torch.dtype, count: int) -> Tensor:
        """Return (count,) elements of the part that is summand `number` of `VALUE_BYTES`."""
        return self._memory[self._ends[number] : self._ends[number + 1]].view(dtype)[:count]


class Changes:
    """The changed values of one version. The calls are, in order: `add` for each block, `upload`
    once, `put` to write the values, `check` to compare them, `release`."""

    def __init__(self, live: Live, threads: int):
        self._live, self._threads = live, threads
        self._added: dict[str, list[tuple[np.ndarray, ...]]] = {}
        self._workspace: _Workspace | None = None  # None if nothing is copied to a device
        self.pieces: list[_Piece] = []
        self.device_bytes = 0

    def add(self, parameter: str, indices: np.ndarray, new: np.ndarray, old: np.ndarray) -> None:
        """Add changes: flat indices (n,) of the parameter, new and old signed patterns (n,)."""
        self._added.setdefault(parameter, []).append((indices, new, old))

    def upload(self, most: int | None) -> None:
        """Allocate at most `most` bytes of the device (see `budget`), and copy there what fits.
        Raises `TransferError` if the device can't give even `MIN_BYTES`."""
        if most is None or not self._added:
            self.pieces = list(self._cut(PIECE))
            return
        values, memory = self._allocate(most)
        self.pieces = list(self._cut(values))
        at = 0
        for piece in self.pieces:
            middle = at + _aligned(piece.indices.nbytes)
            end = middle + _aligned(piece.new.nbytes)
            if end > memory.numel():
                continue
            for name, low, high in (("indices", at, middle), ("new", middle, end)):
                host = getattr(piece, name)
                setattr(piece, name, memory[low:high].view(host.dtype)[: len(host)].copy_(host))
            piece.resident, at = True, end

    def _allocate(self, most: int) -> tuple[int, Tensor]:
        """Allocate the workspace, of at most a quarter of `most`, and memory for resident pieces.
        Return (values of a piece, that memory)."""
        wanted = sum(
            _aligned(part.nbytes)
            for parts in self._added.values()
            for indices, new, _ in parts
            for part in (indices, new)
        )
        while True:
            values = max(1, min(PIECE, most // (4 * VALUE_BYTES)))
            # Each piece aligns its two arrays, which adds at most 16 bytes.
            aligned = wanted + 16 * (
                len(self._added)
                + sum(len(indices) for parts in self._added.values() for indices, _, _ in parts)
                // values
            )
            try:
                self._workspace = _Workspace(values, self._live.device)
                memory = torch.empty(
                    max(0, min(aligned, most - values * VALUE_BYTES)),
                    dtype=torch.uint8,
                    device=self._live.device,
                )
                self.device_bytes = values * VALUE_BYTES + memory.numel()
                return values, memory
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
        for parameter in sorted(self._added):
            indices, new, old = (
                torch.from_numpy(np.concatenate(part))
                for part in zip(*self._added.pop(parameter), strict=False)
            )
            for low in range(0, len(new), values):
                high = low + values
                yield _Piece(parameter, indices[low:high], new[low:high], old[low:high])

    # ----------------------------------------------------------------- the live parameters

    @torch.no_grad()
    def put(self, which: str) -> None:
        """Write the "new" values, or the "old" ones. On a CPU each value costs a cache miss, so
        that threads help. scatter_ is up to four times as fast as `parameter[indices] = new`."""
        self._each(
            lambda piece: self._flat(piece).scatter_(
                0, self._index(piece), self._values(piece, which)
            )
        )

    def check(self) -> None:
        """Compare the live parameters with the new values. Raises `Corrupted` if they differ."""
        wrong: Counter[str] = Counter()
        for piece in self.pieces:
            flat, count = self._flat(piece), len(piece.new)
            if self._workspace is None:
                differ = flat[self._index(piece)] != piece.new
            else:
                found = self._workspace.part(3, flat.dtype, count)
                torch.gather(flat, 0, self._index(piece), out=found)
                differ = self._workspace.part(4, torch.bool, count)
                torch.ne(found, self._values(piece, "new"), out=differ)
            wrong[piece.parameter] += int(differ.sum())
        for parameter, count in wrong.items():
            if count:
                total = sum(len(piece.new) for piece in self.pieces if piece.parameter == parameter)
                raise Corrupted(
                    f"live parameter {parameter}: {count} of {total} values are not what the flip "
                    "wrote; the weights are a mixture now"
                )

    def release(self) -> None:
        """Drop all changes and free their memory."""
        large = self.device_bytes > LARGE_BYTES
        self.pieces, self._workspace, self.device_bytes = [], None, 0
        if large and self._live.device.type == "cuda":
            torch.cuda.empty_cache()  # torch's allocator would keep it for this stream only

    def _each(self, work: Callable[[_Piece], object]) -> None:
        if self._threads == 1 or self._workspace is not None:
            for piece in self.pieces:
                work(piece)
            return
        with ThreadPoolExecutor(self._threads, "flip") as pool:
            for future in [pool.submit(work, piece) for piece in self.pieces]:
                future.result()

    def _flat(self, piece: _Piece) -> Tensor:
        return self._live.matrices[piece.parameter].view(-1)

    def _index(self, piece: _Piece) -> Tensor:
        """Return a piece's indices as (n,) int64, the type that torch needs."""
        if self._workspace is None:
            return piece.indices.long()
        indices, count = piece.indices, len(piece.indices)
        if not piece.resident:
            indices = self._workspace.part(1, indices.dtype, count).copy_(indices)
        return self._workspace.part(0, torch.int64, count).copy_(indices)

    def _values(self, piece: _Piece, which: str) -> Tensor:
        values = getattr(piece, which)
        if self._workspace is None or piece.resident and which == "new":
            return values
        return self._workspace.part(2, values.dtype, len(values)).copy_(values)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // 8) * 8
