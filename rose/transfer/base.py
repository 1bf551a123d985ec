"""The frozen weights below an adapter, of which versions have nothing: what every reader must have
on its own disk, as hashes, in the plan of the adapter's store.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec
import numpy as np
import xxhash

from rose.transfer.blocks import Block, Cuts, Tensor, cut, take


class Base(msgspec.Struct, frozen=True):
    tensors: list[Tensor]  # tied ones once
    blocks: list[Block]
    hashes: list[str]  # xxh3-128 of each block's patterns, in hex
    fingerprint: str  # of all tensors' patterns, one after the other, however they are cut

    def digests(self) -> dict[str, list[tuple[Block, bytes]]]:
        """The blocks of each tensor, by its name, and their digests."""
        found: dict[str, list[tuple[Block, bytes]]] = {tensor.name: [] for tensor in self.tensors}
        for block, digest in zip(self.blocks, self.hashes, strict=True):
            found[self.tensors[block.tensor].name].append((block, bytes.fromhex(digest)))
        return found


def measure(
    weights: Iterable[tuple[Tensor, Callable[[], np.ndarray]]],
    cuts: Callable[[str, tuple[int, ...]], tuple[list[int], list[int]]],
) -> Base:
    """Of each tensor, and a function that gives its patterns, (size,) uint16 or uint32. One is in
    memory at a time."""
    tensors: list[Tensor] = []
    blocks: list[Block] = []
    hashes: list[str] = []
    everything = xxhash.xxh3_128()
    for number, (tensor, read) in enumerate(weights):
        at: Cuts = {tensor.name: cuts(tensor.name, tensor.shape)}
        patterns = read()
        everything.update(patterns.data.cast("B"))
        tensors.append(tensor)
        for block in cut([tensor], at, None, 1):
            hashes.append(digest_of(patterns, block, tensor.columns).hex())
            blocks.append(msgspec.structs.replace(block, tensor=number))
    return Base(tensors, blocks, hashes, everything.hexdigest())


def digest_of(patterns: np.ndarray, block: Block, columns: int) -> bytes:
    """xxh3-128 of one block of a tensor's patterns (size,)."""
    hasher = xxhash.xxh3_128()
    for piece in take(patterns, 0, block, columns):
        hasher.update(np.ascontiguousarray(piece).data.cast("B"))
    return hasher.digest()
