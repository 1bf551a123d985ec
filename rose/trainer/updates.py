"""Find what the updates of a trainer rank's weights change between versions, for `Publisher`,
without a copy of the last version. After each optimizer step the engine calls `compare`, before the
float32 values are copied into the bfloat16 parameters (rose/transfer/updates.py)."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch

from rose.trainer.shards import ShardReader, patterns_of
from rose.transfer.blocks import size, take
from rose.transfer.digests import Run, digests_of, run_of
from rose.transfer.store import Plan
from rose.transfer.updates import Comparison, Moves, in_band

WIDTH = 2  # bytes of a bfloat16 value


class Updates:
    """The changes of this rank's blocks of `plan` since `restart`, and the blocks' hashes. It has
    the methods of `rose.transfer.publish.Updates` and `rose.transfer.digests.Values`."""

    at_once = 2**16  # blocks of one kernel launch: all of them, since the device has no other work

    def __init__(self, shards: ShardReader, plan: Plan, device: torch.device, threads: int):
        self._shards, self._plan, self._threads = shards, plan, threads
        self.device, self.on_gpu = device, device.type == "cuda"
        self._comparison = Comparison(device, threads)
        self.known = False  # true if every update since the last version was compared

    def restart(self) -> None:
        """Drop all changes, since the values of now are the last version's."""
        self._comparison.clear()
        self.known = True

    def forget(self) -> None:
        """Forget the changes, since something other than an update has written values."""
        self._comparison.clear()
        self.known = False

    def compare(self, group: int) -> None:
        """Find what the optimizer's step changed in ZeRO's `group`, before the group is copied."""
        if self.known:
            self._comparison.compare(group, self._shards.flats[group], self._shards.held[group])

    def changes(self, number: int) -> Moves:
        """Return the changes of a block of the plan."""
        block = self._plan.blocks[number]
        columns = self._plan.tensors[block.tensor].columns
        group, origin = self._shards.origin(block)
        moves = self._comparison.changes(group, origin + block.start, origin + block.stop)
        if (block.first, block.last) == (0, columns):
            return moves
        return in_band(moves, block.start, columns, block.first, block.last)

    def digests(self, numbers: Iterable[int]) -> dict[int, bytes]:
        """Return each block's xxh3-128."""
        return digests_of(self, numbers, self._threads)

    def side_stream(self) -> AbstractContextManager:
        """Return a context for kernels: the current stream, as the device has no other work."""
        if self.on_gpu:
            torch.cuda.set_device(self.device)  # A thread begins on device 0.
        return nullcontext()

    def run(self, number: int) -> Run | None:
        """Return where the block's bytes are on the device; None if `run_of` can't describe it."""
        block = self._plan.blocks[number]
        columns = self._plan.tensors[block.tensor].columns
        group, origin = self._shards.origin(block)
        (row, column), (_, end) = divmod(block.start, columns), divmod(block.stop, columns)
        nbytes = WIDTH * size(block, columns)
        if (block.first, block.last) == (0, columns):
            begin, row_bytes, stride = block.start, nbytes, 0
        elif column == end == 0:  # whole rows of a band
            begin = row * columns + block.first
            row_bytes, stride = WIDTH * (block.last - block.first), WIDTH * columns
        else:
            return None
        address = self._shards.held[group].data_ptr() + WIDTH * (origin + begin)
        return run_of(address, row_bytes, stride, nbytes)

    def view(self, number: int) -> np.ndarray:
        """Return the block's bit patterns in host memory."""
        block = self._plan.blocks[number]
        group, origin = self._shards.origin(block)
        columns = self._plan.tensors[block.tensor].columns
        held = self._shards.held[group].detach()
        # The group begins with value -origin of the tensor.
        found = take(held, -origin, block, columns)
        pieces = [piece.reshape(-1) for piece in found]
        return patterns_of(torch.cat(pieces) if len(pieces) > 1 else pieces[0])

    def name(self, number: int) -> str:
        return self._plan.tensors[self._plan.blocks[number].tensor].name
