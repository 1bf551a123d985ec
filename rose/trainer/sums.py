"""Gradients that a replica computed, in a file, and the trainer rank's own share of which they
become a part.

Left out: the way over MPI. The file is in the run's folder, which all ranks see; each trainer rank
reads what it owns. A file has its name once it is whole, and HDF5 checks every chunk that is read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
from torch import Tensor

from rose.files import whole

CHUNK = 2**20  # values that have a checksum of their own


def write(file: str | Path, gradients: Iterable[tuple[str, Tensor]]) -> None:
    """(name, float32 gradient) of every parameter. Raises OSError that names the file."""
    with whole(Path(file)) as part, h5py.File(part, "w", locking=False) as found:
        for name, gradient in gradients:
            values = gradient.reshape(-1).cpu().numpy()
            chunk = (min(CHUNK, len(values)),)
            found.create_dataset(name, data=values, chunks=chunk, fletcher32=True)


class Sum:
    """A file that `write` has written. Raises OSError for one that is not there or is damaged."""

    def __init__(self, file: str | Path) -> None:
        self._file = h5py.File(file, "r", locking=False)

    def __enter__(self) -> Sum:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def add(self, name: str, held: Tensor, begin: int) -> None:
        """Add values `begin` and following of the parameter to `held` (n,), a part of its
        gradient."""
        values: np.ndarray = self._file[name][begin : begin + len(held)]
        if len(values) != len(held):
            raise OSError(f"{self._file.filename}: {name} has fewer values than the trainer's")
        held.add_(torch.from_numpy(values).to(held.device))


def held(
    optimizer: Any, weights: list[tuple[str, torch.nn.Parameter]], stage: int
) -> Iterator[tuple[str, Tensor, int]]:
    """(parameter, what of its reduced gradient is on this rank (n,), its first flat index), under
    ZeRO's `stage` without offload, between the last backward pass and the update. There is no
    public call for it."""
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
