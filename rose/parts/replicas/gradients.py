"""A replica's gradients in a file, and the trainer rank's share of a gradient to which they are
added.

    blocks of up to BLOCK float32 values, parameter after parameter | index | its length, its
    checksum and MAGIC

The index (msgpack) is parameter -> (values, first byte, xxh3-64 of each block). The file is never
mapped into memory or opened by HDF5, since a full or damaged disk would then kill the process
instead of raising an error (rose/transfer/store.py, `image`). A file gets its name when it is
complete. Each trainer rank reads the values that it owns. Left out: sending gradients over MPI, so
replicas must be on the trainer's machine.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
import xxhash
from torch import Tensor

from rose.files import whole
from rose.processes import usable_threads
from rose.trainer.step import Step, TrainingDiverged

BLOCK = 2**20  # values of a block, which has a checksum of its own
THREADS = 8  # most threads that read one file, and so most blocks in memory
MAGIC = b"rosesum1"
_TAIL = struct.Struct("<QQ8s")

Index = dict[str, tuple[int, int, list[int]]]


def write(file: str | Path, gradients: Iterable[tuple[str, Tensor]]) -> None:
    """Write (name, float32 gradient) of every parameter. Raises OSError that names the file."""
    index: Index = {}
    with whole(Path(file)) as part, part.open("wb") as out:
        at = 0
        for name, gradient in gradients:
            values: np.ndarray = gradient.reshape(-1).cpu().numpy()
            digests = []
            for begin in range(0, len(values), BLOCK):
                block = memoryview(values[begin : begin + BLOCK]).cast("B")
                digests.append(xxhash.xxh3_64_intdigest(block))
                out.write(block)
            index[name] = (len(values), at, digests)
            at += values.nbytes
        words = msgspec.msgpack.encode(index)
        out.write(words + _TAIL.pack(len(words), xxhash.xxh3_64_intdigest(words), MAGIC))


class Sum:
    """A file that `write` wrote. It and `add` raise OSError, which names the file, if it is absent
    or damaged, or lacks requested values."""

    def __init__(self, file: str | Path, threads: int = 1) -> None:
        self._path = str(file)
        self._file = os.open(file, os.O_RDONLY)
        self._pool = ThreadPoolExecutor(threads := min(threads, THREADS))
        self._threads = threads
        try:
            self._index = self._read_index()
        except BaseException:
            self.__exit__()
            raise

    def __enter__(self) -> Sum:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()
        os.close(self._file)

    def add(self, name: str, held: Tensor, begin: int) -> None:
        """Add the parameter's values from `begin` on to `held` (n,), a part of its gradient."""
        end = begin + len(held)
        if name not in self._index:
            raise OSError(f"{self._path}: it has no {name}, which the trainer has")
        count = self._index[name][0]
        if count < end:
            raise OSError(f"{self._path}: {name} has fewer values ({count}) than the trainer's")
        blocks = range(begin // BLOCK, -(-end // BLOCK))
        # Threads read and check a few blocks at a time. This thread adds them, in its CUDA stream.
        for first in range(0, len(blocks), self._threads):
            some = blocks[first : first + self._threads]
            for block, values in zip(
                some, self._pool.map(lambda at: self._block(name, at), some), strict=True
            ):
                of = block * BLOCK  # index of the block's first value
                lo, hi = max(begin, of), min(end, of + len(values))
                found = torch.from_numpy(values[lo - of : hi - of])
                held[lo - begin : hi - begin].add_(found.to(held.device))

    def _block(self, name: str, number: int) -> np.ndarray:
        count, at, digests = self._index[name]
        size = min(BLOCK, count - number * BLOCK)
        data = self._read(at + 4 * number * BLOCK, 4 * size)
        if xxhash.xxh3_64_intdigest(data) != digests[number]:
            raise OSError(f"{self._path}: damaged in {name}")
        return np.frombuffer(data, np.float32)

    def _read_index(self) -> Index:
        end = os.fstat(self._file).st_size - _TAIL.size
        if end < 0:
            raise OSError(f"{self._path}: damaged: {end + _TAIL.size} bytes only")
        length, digest, magic = _TAIL.unpack(self._read(end, _TAIL.size))
        if magic != MAGIC or length > end:
            raise OSError(f"{self._path}: damaged at its end")
        words = self._read(end - length, length)
        if xxhash.xxh3_64_intdigest(words) != digest:
            raise OSError(f"{self._path}: damaged in its index")
        return msgspec.msgpack.decode(words, type=Index)

    def _read(self, at: int, size: int) -> bytearray:
        data = bytearray(size)
        view, done = memoryview(data), 0
        while done < size:
            try:
                got = os.preadv(self._file, [view[done:]], at + done)
            except OSError as error:
                raise OSError(error.errno, error.strerror, self._path) from None
            if not got:
                raise OSError(f"{self._path}: damaged: it ends at byte {at + done}")
            done += got
        return data


def add(step: Step) -> None:
    """Add the replicas' gradients to this rank's share, and their statistics to the step's. To be
    called between the update's last backward pass and the update.

    Raises what `Sum` raises, and `TrainingDiverged` if a replica's loss is not finite; alike
    on every rank, since each has all replicas' statistics."""
    if not all(math.isfinite(other.statistics["loss"]) for other in step.others):
        raise TrainingDiverged(
            f"step {step.number}: the loss of a replica's rows is not finite; nothing of this "
            "update was applied"
        )
    engine = step.engine
    threads = engine.settings.threads or usable_threads()
    with step.phase("replica_read"):
        for other in step.others:
            with Sum(other.file, threads) as found:
                for name, held, begin in _held(
                    engine.engine.optimizer,
                    engine.policy.named_weights(),
                    engine.settings.zero_stage,
                ):
                    found.add(name, held, begin)
            step.ratio_max.clamp_(min=other.ratio_max)
            for name, value in other.statistics.items():
                step.sums[name] += value if engine.rank == 0 else 0.0


def _held(
    optimizer: Any, weights: list[tuple[str, torch.nn.Parameter]], stage: int
) -> Iterator[tuple[str, Tensor, int]]:
    """Yield (parameter, this rank's part of its reduced gradient (n,), flat index of the part's
    first value), under ZeRO's `stage` without offload. Valid between the last backward pass and the
    update. DeepSpeed has no public call for it."""
    for name, parameter in weights:
        if stage == 0:
            yield name, parameter.grad.view(-1), 0
        elif stage == 3:
            part, _ = optimizer._get_fp32_grad_state_partition(
                param=parameter, release_swap_buffers=True
            )
            begin = torch.distributed.get_rank() * parameter.ds_tensor.ds_numel
            if (size := min(parameter.ds_numel - begin, part.numel())) > 0:
                yield name, part.view(-1)[:size], begin
        elif (mapped := parameter._hp_mapping) is not None:
            part = mapped.get_lp_grad_fragment(parameter._index_in_param_group)
            yield name, part.view(-1), mapped.lp_fragment_address.start
