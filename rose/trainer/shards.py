"""Which values of which tensor this trainer rank owns, and how to read them: ZeRO's own partition.

Stage 3 splits every tensor evenly over the ranks; stages 1 and 2 flatten a group of tensors and
split the whole, so a rank owns whole tensors and the ends of two. With stage 0 all ranks hold
everything and blocks are shared out.

Under ZeRO the values are read from the optimizer's float32 partition, which is final as soon as
this rank's optimizer has stepped: before it is copied into the parameters, and before the
all-gather of these.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np
import torch

from rose.transfer.blocks import Block, Shards, Tensor, take

PATTERNS = {torch.bfloat16: torch.int16, torch.float32: torch.int32}


def patterns_of(values: torch.Tensor) -> np.ndarray:
    """(n,) bfloat16 or float32 -> (n,) uint16 or uint32 in host memory."""
    array = values.view(PATTERNS[values.dtype]).cpu().numpy()
    return array.view(np.uint16 if array.itemsize == 2 else np.uint32)


class Part(NamedTuple):
    """Values `begin` to `end` of a flattened parameter are this rank's, in its float32 `group` from
    `at` on."""

    name: str
    begin: int
    end: int
    group: int
    at: int


class ShardReader:
    """`weights`: (name, parameter) in the model's order; `dtype`: of what is read; `scales`: by
    which values are multiplied, of the names that have one."""

    def __init__(
        self,
        engine,
        weights: list[tuple[str, torch.nn.Parameter]],
        stage: int,
        dtype: torch.dtype,
        rank: int,
        world: int,
        scales: Mapping[str, float] | None = None,
    ):
        self._weights, self._dtype, self._scales = weights, dtype, scales or {}
        self._rank = rank
        name = str(dtype).removeprefix("torch.")
        self.tensors = [Tensor(n, tuple(getattr(p, "ds_shape", p.shape)), name) for n, p in weights]
        self.shards: Shards | None = None
        # parameter -> group, offset within it, first flat index
        self._masters: dict[int, tuple[int, int, int]] = {}
        if stage == 3:
            self.flats = engine.optimizer.fp32_partitioned_groups_flat
            self._split_evenly(engine.optimizer, rank, world)
        elif stage in (1, 2):
            self.flats = engine.optimizer.single_partition_of_fp32_groups
            self._split_groups(engine.optimizer, rank, world)

    def read(self, block: Block) -> np.ndarray:
        """(n,) uint16 or uint32: the block's patterns now, a copy."""
        weight, parameter = self._weights[block.tensor]
        if self._masters:
            group, at, first = self._masters[id(parameter)]
            values = self.flats[group].detach()[at:]
        else:
            values, first = parameter.detach().reshape(-1), 0
        found = take(values, first, block, self.tensors[block.tensor].columns)
        pieces = [piece.reshape(-1) for piece in found]
        whole = torch.cat(pieces) if len(pieces) > 1 else pieces[0].clone()
        held = whole.to(parameter.dtype)  # as it is in the parameter
        if scale := self._scales.get(weight):
            held = held.float() * scale
        return patterns_of(held.to(self._dtype))

    def own(self) -> Iterator[Part]:
        """What this rank has in `flats`, its float32 groups; under ZeRO."""
        for name, parameter in self._weights:
            group, at, first = self._masters.get(id(parameter), (0, 0, 0))
            for rank, begin, end in self.shards[name]:
                if rank == self._rank and begin < end:
                    yield Part(name, begin, end, group, at + begin - first)

    def _split_evenly(self, optimizer, rank: int, world: int) -> None:
        self.shards = {}
        for tensor, (_, parameter) in zip(self.tensors, self._weights, strict=True):
            part = parameter.ds_tensor.ds_numel
            self.shards[tensor.name] = [
                (r, min(r * part, tensor.size), min((r + 1) * part, tensor.size))
                for r in range(world)
            ]
        for number, group in enumerate(optimizer.fp16_groups):
            at = 0
            for parameter in group:
                part = parameter.ds_tensor.ds_numel
                self._masters[id(parameter)] = (number, at, rank * part)
                at += part

    def _split_groups(self, optimizer, rank: int, world: int) -> None:
        names = {id(parameter): name for name, parameter in self._weights}
        self.shards = {}
        o = optimizer
        groups, offsets_of = o.round_robin_bit16_groups, o.round_robin_bit16_offsets
        parts = zip(groups, offsets_of, o.bit16_groups_flat, strict=True)
        for number, (group, offsets, flat) in enumerate(parts):
            part = flat.numel() // world
            for parameter, offset in zip(group, offsets, strict=True):
                end = offset + parameter.numel()
                self.shards[names[id(parameter)]] = [
                    (r, max(offset, r * part) - offset, min(end, (r + 1) * part) - offset)
                    for r in range(offset // part, -(-end // part))
                ]
                begin = max(offset, rank * part)
                self._masters[id(parameter)] = (number, begin - rank * part, begin - offset)
