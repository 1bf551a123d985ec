"""The live parameters of one engine rank, and the places of a version's blocks in them."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch

from rose.transfer.blocks import Rectangle
from rose.transfer.errors import TransferError

PATTERNS = {2: torch.int16, 4: torch.int32}
TYPES = (torch.bfloat16, torch.float32, torch.int16, torch.int32)


class Place(NamedTuple):
    """The place of a block in a live parameter: `rectangles` of the parameter's (rows, columns)
    matrix, in order."""

    parameter: str
    rectangles: list[Rectangle]

    @property
    def size(self) -> int:
        return sum(r.size for r in self.rectangles)


def check_type(name: str, tensor: torch.Tensor) -> None:
    """Raise `TransferError` for a parameter of a type that no version has."""
    if tensor.dtype not in TYPES:
        raise TransferError(
            f"live parameter {name} is {tensor.dtype}: versions are in bfloat16 or float32, and a "
            "quantised engine can't be brought to them; start it with the unquantised model, "
            "without rollout.engine_args.quantization"
        )


class Live:
    """The live parameters of one engine rank as integer matrices.

    `parameters` has contiguous tensors by name, (..., columns) or (rows,), bfloat16 or float32, all
    on one device. Raises `TransferError` for any other tensor."""

    def __init__(self, parameters: Mapping[str, torch.Tensor]):
        self.matrices: dict[str, torch.Tensor] = {}
        self.device = next(iter(parameters.values())).device if parameters else torch.device("cpu")
        self.on_gpu = self.device.type == "cuda"
        self._side_stream = torch.cuda.Stream(self.device) if self.on_gpu else None
        for name, tensor in parameters.items():
            check_type(name, tensor)
            if not tensor.is_contiguous():
                raise TransferError(f"live parameter {name} is not contiguous in memory")
            if tensor.device != self.device:
                raise TransferError(
                    f"live parameter {name} is on {tensor.device}, the first one on {self.device}"
                )
            patterns = tensor.detach().view(PATTERNS[tensor.element_size()])
            shape = patterns.shape  # Of several dimensions, all but the last count as rows.
            self.matrices[name] = patterns.view(-1, shape[-1] if len(shape) > 1 else 1)

    def side_stream(self):
        """Return a context in which copies from and to a GPU don't wait for the engine's kernels.
        Leaving it does not wait for the copies: `synchronize` does."""
        if self._side_stream is None:
            return nullcontext()
        # A thread begins on device 0. When the context ends, torch would return there and create a
        # CUDA context of half a GiB, for every rank of a tensor-parallel engine.
        torch.cuda.set_device(self.device)
        return torch.cuda.stream(self._side_stream)

    def synchronize(self) -> None:
        if self._side_stream is not None:
            self._side_stream.synchronize()

    def read(self, place: Place) -> np.ndarray:
        """Return a block's patterns (n,) uint16 or uint32 as a copy in host memory."""
        matrix, at = self.matrices[place.parameter], 0
        out = torch.empty(place.size, dtype=matrix.dtype)
        for r in place.rectangles:
            part = matrix[r.first_row : r.last_row, r.first_column : r.last_column]
            out[at : at + r.size].view(part.shape).copy_(part)
            at += r.size
        return unsigned(out)

    def view(self, place: Place) -> np.ndarray:
        """Return a block's patterns (n,) uint16 or uint32: the parameter's own memory if that is
        host memory in which the block has no gaps, else a copy. Nothing may be written to it."""
        matrix, first = self.matrices[place.parameter], place.rectangles[0]
        if matrix.device.type != "cpu" or not one_run(place, matrix.shape[1]):
            return self.read(place)
        begin = first.first_row * matrix.shape[1] + first.first_column
        return unsigned(matrix.view(-1)[begin : begin + place.size])

    def write(self, place: Place, values: torch.Tensor) -> None:
        """Write a block's patterns (n,), which are on the parameter's device or the host."""
        matrix, at = self.matrices[place.parameter], 0
        for r in place.rectangles:
            target = matrix[r.first_row : r.last_row, r.first_column : r.last_column]
            target.copy_(values[at : at + r.size].view(target.shape))
            at += r.size

    def indices(self, place: Place, positions: np.ndarray) -> np.ndarray:
        """Convert ascending positions (c,) in a block into flat indices (c,) in the parameter:
        int32, or int64 for a parameter that is too large for int32."""
        matrix = self.matrices[place.parameter]
        columns, dtype = matrix.shape[1], np.int32 if matrix.numel() < 2**31 else np.int64
        positions = positions.astype(dtype, copy=False)
        out, at = np.empty(len(positions), dtype), 0
        ends = np.searchsorted(positions, np.cumsum([r.size for r in place.rectangles]))
        low = 0
        for r, high in zip(place.rectangles, ends.tolist(), strict=False):
            if (r.first_column, r.last_column) == (0, columns):  # whole rows are one run
                out[low:high] = positions[low:high] + (r.first_row * columns - at)
            else:
                row, column = np.divmod(positions[low:high] - at, r.last_column - r.first_column)
                out[low:high] = (row + r.first_row) * columns + column + r.first_column
            at, low = at + r.size, high
        return out


def one_run(place: Place, columns: int) -> bool:
    """True if the rectangles follow one another in memory without gaps."""
    end = None
    for r in place.rectangles:
        begin = r.first_row * columns + r.first_column
        whole_rows = (r.first_column, r.last_column) == (0, columns)
        if not (whole_rows or r.last_row - r.first_row == 1) or end not in (None, begin):
            return False
        end = begin + r.size
    return True


def unsigned(patterns: torch.Tensor) -> np.ndarray:
    """Return contiguous patterns (n,) of 2 or 4 bytes in host memory as uint16 or uint32, without a
    copy. After `Tensor.numpy`, torch could not resize the storage any more, which a trainer does
    when it leaves its device (rose/trainer/offload.py)."""
    dtype: np.dtype = np.dtype(np.uint16 if patterns.element_size() == 2 else np.uint32)
    if not patterns.numel():
        return np.empty(0, dtype)
    buffer: Any = (ctypes.c_char * patterns.nbytes).from_address(patterns.data_ptr())
    buffer.tensor = patterns  # memory kept as long as the array
    return np.frombuffer(buffer, dtype)
