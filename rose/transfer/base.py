"""The hashes of the frozen weights below an adapter.

Versions of an adapter don't contain these weights, so every reader must have them on its own disk.
The plan of the adapter's store has their hashes, and a reader compares its weights with these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec
import numpy as np
import xxhash

from rose.transfer.blocks import Block, Cuts, Tensor, cut, take


class Base(msgspec.Struct, frozen=True):
    tensors: list[Tensor]  # tied tensors once
    blocks: list[Block]
    hashes: list[str]  # xxh3-128 of each block's patterns, in hex
    fingerprint: str  # xxh3-128 of all tensors' patterns in order, independent of the cuts

    def digests(self) -> dict[str, list[tuple[Block, bytes]]]:
        """Return each tensor's blocks with their digests, by the tensor's name."""
        found: dict[str, list[tuple[Block, bytes]]] = {tensor.name: [] for tensor in self.tensors}
        for block, digest in zip(self.blocks, self.hashes, strict=True):
            found[self.tensors[block.tensor].name].append((block, bytes.fromhex(digest)))
        return found


def measure(
    weights: Iterable[tuple[Tensor, Callable[[], np.ndarray]]],
    cuts: Callable[[str, tuple[int, ...]], tuple[list[int], list[int]]],
) -> Base:
    """Return the base of `weights`, each a tensor and a function that reads its bit patterns
    (size,) as integers. `cuts(name, shape)` gives its cuts. One tensor is in memory at a time."""
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


def xxh3(patterns: np.ndarray) -> bytes:
    """Return the xxh3-128 of the little-endian bytes of contiguous patterns."""
    return xxhash.xxh3_128_digest(patterns.data.cast("B"))


def digest_of(patterns: np.ndarray, block: Block, columns: int) -> bytes:
    """Return the xxh3-128 of one block of a tensor's patterns (size,)."""
    hasher = xxhash.xxh3_128()
    for piece in take(patterns, 0, block, columns):
        hasher.update(np.ascontiguousarray(piece).data.cast("B"))
    return hasher.digest()
