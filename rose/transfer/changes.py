"""The single values that a version changes, on their way from the host into parameters on a device.

Before the flip as many of them as the device has room for are brought there: 6 bytes for a bfloat16
value, an index of 4 and the new value. The rest waits on the host and comes through one small piece
of device memory during the flip: the pause is longer, and no version is too large for the device.
Old values stay on the host: a flip that breaks off needs them, no other. All device memory is taken
before the flip, so that a flip can't run out of it.
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

PIECE = 2**20  # values that are worked on at once
# bytes of one of them: torch's index, ours, the new value, the live one, whether they differ
WORK = 8 + 8 + 4 + 4 + 1
# bytes of the device that staging leaves free: an engine's activations grow with its batches
RESERVE = 512 * 2**20
LEAST = 32 * 2**20  # bytes that it takes even where less is free than that
LARGE = 256 * 2**20  # bytes from which on the allocator is told to give them back


def budget(live: Live, most: int | None) -> int | None:
    """Bytes of the device that staging may take now: `most`, or less where less is free. Null: the
    parameters are in host memory, and nothing needs to be brought there."""
    if live.device.type != "cuda":
        return most
    free = torch.cuda.mem_get_info(live.device)[0] - RESERVE
    return max(LEAST, free if most is None else min(free, most))


def at_once(room: int | None, threads: int) -> int:
    """Values that each of so many threads may work on within `room` bytes of the device."""
    return PIECE if room is None else max(1, min(PIECE // 4, room // (WORK * threads)))


@dataclass
class _Piece:
    """Some changes of one parameter. `indices` (n,) and `new` (n,) are on the device if `resident`,
    else on the host, as `old` (n,) always is."""

    parameter: str
    indices: Tensor
    new: Tensor
    old: Tensor
    resident: bool = False


class _Room:
    """Device memory for one piece of `values` values on its way."""

    def __init__(self, values: int, device: torch.device):
        self._memory = torch.empty(values * WORK, dtype=torch.uint8, device=device)
        self._ends = [values * end for end in (0, 8, 16, 20, 24, 25)]

    def part(self, number: int, dtype: torch.dtype, count: int) -> Tensor:
        """(count,) of the part `number` of `WORK`'s sum."""
        return self._memory[self._ends[number] : self._ends[number + 1]].view(dtype)[:count]


class Changes:
    """Filled by `add`, brought near by `upload`, written by `put`, compared by `check`, dropped by
    `release`."""

    def __init__(self, live: Live, threads: int):
        self._live, self._threads = live, threads
        self._added: dict[str, list[tuple[np.ndarray, ...]]] = {}
        self._room: _Room | None = None  # null: on the host, where nothing is brought anywhere
        self.pieces: list[_Piece] = []
        self.device_bytes = 0

    def add(self, parameter: str, indices: np.ndarray, new: np.ndarray, old: np.ndarray) -> None:
        """(n,) flat indices of the parameter; (n,) signed patterns."""
        self._added.setdefault(parameter, []).append((indices, new, old))

    def upload(self, most: int | None) -> None:
        """Take at most `most` bytes of the device (`budget` says how many), and bring there what
        finds room. Raises `TransferError` when the device has not even `LEAST` bytes."""
        if most is None or not self._added:
            self.pieces = list(self._cut(PIECE))
            return
        values, memory = self._take(most)
        self.pieces = list(self._cut(values))
        at = 0
        for piece in self.pieces:
            ends = (
                at + _aligned(piece.indices.nbytes),
                at + _aligned(piece.indices.nbytes) + _aligned(piece.new.nbytes),
            )
            if ends[1] > memory.numel():
                continue
            for name, begin, end in (("indices", at, ends[0]), ("new", *ends)):
                host = getattr(piece, name)
                setattr(piece, name, memory[begin:end].view(host.dtype)[: len(host)].copy_(host))
            piece.resident, at = True, ends[1]

    def _take(self, most: int) -> tuple[int, Tensor]:
        """(values of a piece, memory for the resident ones): a quarter of what there is for the
        first, at most."""
        wanted = sum(
            _aligned(part.nbytes)
            for parts in self._added.values()
            for indices, new, _ in parts
            for part in (indices, new)
        )
        while True:
            values = max(1, min(PIECE, most // (4 * WORK)))
            # each piece is aligned anew
            wanted_here = wanted + 16 * (
                len(self._added)
                + sum(len(indices) for parts in self._added.values() for indices, _, _ in parts)
                // values
            )
            try:
                self._room = _Room(values, self._live.device)
                memory = torch.empty(
                    max(0, min(wanted_here, most - values * WORK)),
                    dtype=torch.uint8,
                    device=self._live.device,
                )
                self.device_bytes = values * WORK + memory.numel()
                return values, memory
            except torch.OutOfMemoryError as error:
                self._room = None
                torch.cuda.empty_cache()
                if most <= LEAST:
                    raise TransferError(
                        f"staging a version needs {LEAST / 2**20:g} MiB of {self._live.device}, which has not even "
                        f"those: lower rollout.gpu_memory_utilization or rollout.kv_cache_gib ({error})"
                    ) from error
                most = max(LEAST, most // 4)

    def _cut(self, values: int) -> Iterator[_Piece]:
        for parameter in sorted(self._added):
            indices, new, old = (
                torch.from_numpy(np.concatenate(part)) for part in zip(*self._added.pop(parameter))
            )
            for low in range(0, len(new), values):
                high = low + values
                yield _Piece(parameter, indices[low:high], new[low:high], old[low:high])

    # ----------------------------------------------------------------- what is there

    @torch.no_grad()
    def put(self, which: str) -> None:
        """Write the "new" values, or the "old" ones. On a CPU single values cost a miss of the
        cache each, so that threads help, and scatter_ takes a quarter to all of the time of
        `parameter[indices] = new`."""
        self._each(
            lambda piece: self._flat(piece).scatter_(
                0, self._index(piece), self._values(piece, which)
            )
        )

    def check(self) -> None:
        """Compare what stands in the parameters with the new values. Raises `Corrupted`."""
        wrong: Counter[str] = Counter()
        for piece in self.pieces:
            flat, count = self._flat(piece), len(piece.new)
            if self._room is None:
                differ = flat[self._index(piece)] != piece.new
            else:
                found = self._room.part(3, flat.dtype, count)
                torch.gather(flat, 0, self._index(piece), out=found)
                differ = torch.ne(
                    found, self._values(piece, "new"), out=self._room.part(4, torch.bool, count)
                )
            wrong[piece.parameter] += int(differ.sum())
        for parameter, count in wrong.items():
            if count:
                total = sum(len(piece.new) for piece in self.pieces if piece.parameter == parameter)
                raise Corrupted(
                    f"live parameter {parameter}: {count} of {total} values are not what the flip wrote; "
                    "the weights are a mixture now"
                )

    def release(self) -> None:
        """Give the memory back; afterwards there are no changes."""
        large, self.pieces, self._room = self.device_bytes > LARGE, [], None
        self.device_bytes = 0
        if large and self._live.device.type == "cuda":
            torch.cuda.empty_cache()  # else the allocator keeps it for this stream alone

    def _each(self, work: Callable[[_Piece], object]) -> None:
        if self._threads == 1 or self._room is not None:
            for piece in self.pieces:
                work(piece)
            return
        with ThreadPoolExecutor(self._threads, "flip") as pool:
            for future in [pool.submit(work, piece) for piece in self.pieces]:
                future.result()

    def _flat(self, piece: _Piece) -> Tensor:
        return self._live.matrices[piece.parameter].view(-1)

    def _index(self, piece: _Piece) -> Tensor:
        """(n,) int64, as torch wants them."""
        if self._room is None:
            return piece.indices.long()
        indices, count = piece.indices, len(piece.indices)
        if not piece.resident:
            indices = self._room.part(1, indices.dtype, count).copy_(indices)
        return self._room.part(0, torch.int64, count).copy_(indices)

    def _values(self, piece: _Piece, which: str) -> Tensor:
        values = getattr(piece, which)
        if self._room is None or piece.resident and which == "new":
            return values
        return self._room.part(2, values.dtype, len(values)).copy_(values)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // 8) * 8
