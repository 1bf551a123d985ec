"""A small model of several trainer ranks, all in one process, and its weights after each step."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import torch

from rose.transfer.base import Base
from rose.transfer.blocks import Tensor, cut, take
from rose.transfer.publish import Publisher
from rose.transfer.store import FORMAT, INITIAL, Plan

SHAPES = {"embed": (50, 12), "layer.weight": (24, 12), "layer.bias": (24,), "norm": (12,)}
CUTS = {"embed": ([0, 25, 50], []), "layer.weight": ([], [0, 6, 12])}
CUTS |= {"layer.bias": ([0, 12, 24], [])}


class Peer:
    """One rank of a world of threads."""

    def __init__(self, world: World, rank: int):
        self._world, self.rank, self.world = world, rank, world.size

    def barrier(self) -> None:
        self._world.gate.wait(240)

    def sum(self, value: int) -> int:
        self.barrier()
        self._world.values[self.rank] = value
        self.barrier()
        return sum(self._world.values)


class Model:
    """Tensors, how they are cut into blocks, and what each trainer rank has of them: an even run of
    each tensor's values, as with ZeRO-3."""

    def __init__(
        self,
        weights: dict[str, torch.Tensor],
        cuts: dict | None = None,
        size: int = 2,
        largest: int = 100,
        base: Base | None = None,
    ):
        self.size, self.weights = size, weights
        tensors = [
            Tensor(n, tuple(t.shape), str(t.dtype).removeprefix("torch."))
            for n, t in self.weights.items()
        ]
        self.shards = {t.name: self._even(t.size) for t in tensors}
        blocks = cut(tensors, CUTS if cuts is None else cuts, self.shards, size, largest)
        self.plan = Plan(FORMAT, "", size, tensors, blocks, base)

    def _even(self, size: int) -> list[tuple[int, int, int]]:
        part = -(-size // self.size)
        return [(r, min(r * part, size), min((r + 1) * part, size)) for r in range(self.size)]

    def read(self, block, rank: int) -> np.ndarray:
        """The block's patterns now."""
        tensor = self.plan.tensors[block.tensor]
        _, start, stop = self.shards[tensor.name][rank]
        # a rank reads nothing but its shard
        flat = self.weights[tensor.name].reshape(-1)[start:stop]
        values = torch.cat([p.reshape(-1) for p in take(flat, start, block, tensor.columns)])
        signed = values.view(torch.int16 if values.element_size() == 2 else torch.int32).numpy()
        return signed.view(np.uint16 if signed.itemsize == 2 else np.uint32)


class World(Model):
    """Its ranks are threads that publish. The weights are those of the model's folder until `step`
    or an assignment changes them."""

    def __init__(
        self,
        store: Path,
        weights: dict[str, torch.Tensor] | None = None,
        cuts: dict | None = None,
        size: int = 2,
        dtype: torch.dtype = torch.bfloat16,
        largest: int = 100,
        seed: int = 0,
        full_every: int = 8,
        keep: int = 2,
        timeout_s: float = 120.0,
        base: Base | None = None,
    ):
        self.generator = torch.Generator().manual_seed(seed)
        if weights is None:
            normal = {n: torch.randn(s, generator=self.generator) for n, s in SHAPES.items()}
            weights = {name: (values * 0.02).to(dtype) for name, values in normal.items()}
        super().__init__(weights, cuts, size, largest, base)
        self.gate, self.values, self.store = threading.Barrier(size), [0] * size, Path(store)
        self.publishers = self.together(
            lambda rank: Publisher(
                *(self.store, self.plan, Peer(self, rank), lambda block: self.read(block, rank)),
                *(1, full_every, keep, timeout_s),
            )
        )
        self.plan = self.publishers[0].plan

    def step(self, share: float = 0.05) -> None:
        """Change about so many of the values by a little."""
        for name, tensor in self.weights.items():
            mask = torch.rand(tensor.shape, generator=self.generator) < share
            noise = (torch.randn(tensor.shape, generator=self.generator) * 0.001).to(tensor.dtype)
            self.weights[name] = torch.where(mask, tensor + noise, tensor)

    def publish(self, version: int, **options):
        """And in full, where that is due: without the collecting that `tidy` does besides."""
        published = self.together(lambda rank: self.publishers[rank].publish(version, **options))[0]
        if self.publishers[0].full_due():
            self.together(lambda rank: self.publishers[rank].write_full())
        return published

    def tidy(self):
        return self.together(lambda rank: self.publishers[rank].tidy())[0]

    def together(self, call):
        """`call(rank)` on all ranks at once, their results."""
        results, errors = [None] * self.size, []

        def run(rank: int) -> None:
            try:
                results[rank] = call(rank)
            except BaseException as error:
                errors.append(error)
                self.gate.abort()

        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(240)
        for error in sorted(errors, key=lambda e: isinstance(e, threading.BrokenBarrierError)):
            raise error
        return results


class History:
    """A world, and the weights of each version that it has published."""

    def __init__(self, store, versions: int, tidy: bool = True, **options):
        self.world = World(store, **options)
        self.store, self.weights = self.world.store, {INITIAL: dict(self.world.weights)}
        for version in range(versions):
            self.publish(version, tidy)

    def publish(self, version: int, tidy: bool = True):
        self.world.step(0.1)
        self.world.publish(version)
        self.weights[version] = dict(self.world.weights)
        if tidy:
            self.world.tidy()

    def live(self, version):
        return {
            name: torch.zeros_like(t) if version is None else t.clone()
            for name, t in self.weights[INITIAL if version is None else version].items()
        }


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    """Bit for bit."""
    return left.keys() == right.keys() and all(
        left[n].dtype == right[n].dtype
        and torch.equal(left[n].view(torch.uint8), right[n].view(torch.uint8))
        for n in left
    )
