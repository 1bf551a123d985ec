"""ZeRO's partition: which values of which tensor this trainer rank owns, and how to read them.

Stage 3 splits every tensor evenly over the ranks. Stages 1 and 2 flatten a group of tensors and
split the result. So a rank owns whole tensors, and parts of the two at its ends. With stage 0 all
ranks hold everything, and the blocks are distributed over them.

Under ZeRO the values are read from the optimizer's float32 partition. It is final as soon as this
rank's optimizer has stepped, before it is copied into the parameters and these are gathered.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from rose.trainer.experts import parts
from rose.transfer.blocks import Block, Shards, Tensor, take
from rose.transfer.live import unsigned


def patterns_of(values: torch.Tensor) -> np.ndarray:
    """Return the bit patterns of (n,) bfloat16 or float32 values as uint16 or uint32 in host
    memory. Contiguous values in host memory are not copied."""
    return unsigned(values.cpu().contiguous())


class Share(NamedTuple):
    """Values `begin` to `end` of a flat parameter, in this rank's float32 `group` from `at` on."""

    name: str
    begin: int
    end: int
    group: int
    at: int


class ShardReader:
    """Reader of this rank's values, as `dtype`. `weights`: (name, parameter) in the model's order;
    `scales`: name -> factor, for tensors whose values are multiplied."""

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
        self.tensors: list[Tensor] = []
        # each tensor's parameter, and the flat index of its first value there
        self._sources: list[tuple[torch.nn.Parameter, int]] = []
        for whole, parameter in weights:
            for part in parts(whole, tuple(getattr(parameter, "ds_shape", parameter.shape))):
                self.tensors.append(Tensor(part.name, part.shape, name))
                self._sources.append((parameter, part.start))
        self.shards: Shards | None = None
        # id of a parameter -> (rank, begin, end) of flat indices
        self._ranges: Mapping[int, list[tuple[int, int, int]]] = {}
        # id of a parameter -> group, offset in it, flat index of the parameter's first value there
        self._masters: dict[int, tuple[int, int, int]] = {}
        # This rank's part of each group under ZeRO: the optimizer's float32 values, and the values
        # of the parameters, into which ZeRO copies them after each update.
        self.flats: Sequence[torch.Tensor] = []
        self.held: Sequence[torch.Tensor] = []
        if stage == 3:
            self.flats = engine.optimizer.fp32_partitioned_groups_flat
            self.held = engine.optimizer.fp16_partitioned_groups_flat
            self._find_even_ranges(engine.optimizer, rank, world)
        elif stage in (1, 2):
            self.flats = engine.optimizer.single_partition_of_fp32_groups
            groups = engine.optimizer.parallel_partitioned_bit16_groups
            self.held = [partitions[rank] for partitions in groups]
            self._find_group_ranges(engine.optimizer, rank, world)

    def read(self, block: Block) -> np.ndarray:
        """Return the block's current bit patterns, (n,) uint16 or uint32. They may share the
        parameter's memory."""
        tensor, (parameter, start) = self.tensors[block.tensor], self._sources[block.tensor]
        if self._masters:
            group, at, first = self._masters[id(parameter)]
            values = self.flats[group].detach()[at:]
        else:
            values, first = parameter.detach().reshape(-1), 0
        found = take(values, first - start, block, tensor.columns)
        pieces = [piece.reshape(-1) for piece in found]
        whole = torch.cat(pieces) if len(pieces) > 1 else pieces[0]
        held = whole.to(parameter.dtype)  # values as the parameter has them, rounded
        if scale := self._scales.get(tensor.name):
            held = held.float() * scale
        return patterns_of(held.to(self._dtype))

    def origin(self, block: Block) -> tuple[int, int]:
        """Under ZeRO, return the group that has a block's values, and the index in it at which the
        block's whole tensor begins: a virtual index if another rank has the tensor's beginning."""
        parameter, start = self._sources[block.tensor]
        group, at, first = self._masters[id(parameter)]
        return group, at + start - first

    def own(self) -> Iterator[Share]:
        """Under ZeRO, yield this rank's share of each parameter in `flats`, its float32 groups."""
        for name, parameter in self._weights:
            group, at, first = self._masters.get(id(parameter), (0, 0, 0))
            for rank, begin, end in self._ranges[id(parameter)]:
                if rank == self._rank and begin < end:
                    yield Share(name, begin, end, group, at + begin - first)

    def _share(self, ranges: Mapping[int, list[tuple[int, int, int]]]) -> Shards:
        """Keep the `ranges` of parameters, and return the same ranges for each tensor."""
        self._ranges, found = ranges, {}
        for tensor, (parameter, start) in zip(self.tensors, self._sources, strict=True):
            clipped = [
                (owner, max(low - start, 0), min(high - start, tensor.size))
                for owner, low, high in ranges[id(parameter)]
            ]
            found[tensor.name] = [c for c in clipped if c[1] < c[2]]
        return found

    def _find_even_ranges(self, optimizer, rank: int, world: int) -> None:
        """Find the ranges of stage 3, which splits each parameter evenly."""
        ranges = {}
        for parameter, _ in self._sources:
            part, size = parameter.ds_tensor.ds_numel, parameter.ds_numel
            ranges[id(parameter)] = [
                (r, min(r * part, size), min((r + 1) * part, size)) for r in range(world)
            ]
        self.shards = self._share(ranges)
        for number, group in enumerate(optimizer.fp16_groups):
            at = 0
            for parameter in group:
                part = parameter.ds_tensor.ds_numel
                self._masters[id(parameter)] = (number, at, rank * part)
                at += part

    def _find_group_ranges(self, optimizer, rank: int, world: int) -> None:
        """Find the ranges of stages 1 and 2, which split flattened groups of parameters."""
        ranges = {}
        o = optimizer
        groups, offsets_of = o.round_robin_bit16_groups, o.round_robin_bit16_offsets
        per_group = zip(groups, offsets_of, o.bit16_groups_flat, strict=True)
        for number, (group, offsets, flat) in enumerate(per_group):
            part = flat.numel() // world
            for parameter, offset in zip(group, offsets, strict=True):
                end = offset + parameter.numel()
                ranges[id(parameter)] = [
                    (r, max(offset, r * part) - offset, min(end, (r + 1) * part) - offset)
                    for r in range(offset // part, -(-end // part))
                ]
                begin = max(offset, rank * part)
                self._masters[id(parameter)] = (number, begin - rank * part, begin - offset)
        self.shards = self._share(ranges)
