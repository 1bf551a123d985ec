"""Versions for those who read them apart from a run, such as the export of a model's folder: which
ones a store can give, a copy of it that its writer can't remove, and the hashes that a checkpoint
keeps of the weights that engines got.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec
import numpy as np

from rose.transfer.base import Base, digest_of
from rose.transfer.blocks import Block, Tensor, size
from rose.transfer.errors import Corrupted, Missing
from rose.transfer.store import (
    FORMAT,
    FULL,
    INITIAL,
    MANIFEST,
    PLAN,
    Plan,
    parse_edge,
    seal,
    unseal,
    write_file,
)

Digests = list[tuple[Block, bytes]]  # of one tensor: its blocks, and the xxh3-128 of each


def readable(store: Path) -> list[int]:
    """The versions that a store's files lead to from nothing, in order; [] of what is no store. A
    reader can still find one damaged."""
    edges = {
        edge
        for manifest in Path(store).glob(f"v*/*/{MANIFEST}")
        if (edge := parse_edge(manifest.parent.parent.name, manifest.parent.name)) is not None
    }
    found = {version for version, base in edges if base is FULL}
    for version, base in sorted(edge for edge in edges if edge[1] not in (FULL, INITIAL)):
        if base in found:
            found.add(version)
    return sorted(found) if (Path(store) / PLAN).is_file() else []


def linked(store: Path, folder: Path, version: int) -> Path:
    """A store of hard links in `folder`, which must not exist, to everything that is there now: no
    byte is copied, and what the trainer removes from then on stays here. `store` itself where
    these don't lead to `version`, as on a file system without such links."""
    try:
        shutil.copytree(store, folder, copy_function=os.link, ignore=shutil.ignore_patterns(".*"))
    except shutil.Error:
        pass  # of a version that was removed in this moment, or on a file system without links
    except OSError:
        return store
    return folder if version in readable(folder) else store


class Hashes(msgspec.Struct, frozen=True, omit_defaults=True):
    """Of the blocks that one trainer rank wrote of a version: xxh3-128, in hex, of each."""

    format: int
    version: int
    tensors: list[Tensor]  # of the whole model
    blocks: list[Block]
    hashes: list[str]
    base: Base | None = None  # below the tensors, if they are an adapter's


def hashes_file(folder: Path, rank: int) -> Path:
    return Path(folder) / f"weights-{rank:05d}.json"


def write_hashes(
    folder: Path, rank: int, plan: Plan, version: int, digests: Mapping[int, bytes]
) -> None:
    """`digests`: xxh3-128 of each of this rank's blocks, by its number in the plan. Raises
    `TransferError`."""
    blocks = [plan.blocks[number] for number in digests]
    hashes = [d.hex() for d in digests.values()]
    found = Hashes(FORMAT, version, plan.tensors, blocks, hashes, plan.base)
    write_file(hashes_file(folder, rank), seal(found))


def read_hashes(
    folder: Path, ranks: int, version: int
) -> tuple[list[Tensor], dict[str, Digests], Base | None]:
    """The published tensors, each one's digests by name, and the base if they are an adapter's.
    Raises `Missing` for a rank's file that is not there, `Corrupted` for a damaged one."""
    tensors: list[Tensor] = []
    below: Base | None = None
    digests: dict[str, Digests] = {}
    for rank in range(ranks):
        path = hashes_file(folder, rank)
        try:
            found: Hashes = unseal(path.read_bytes(), Hashes, str(path))
        except FileNotFoundError:
            raise Missing(f"{path}: not there, so nobody can say what the engines had") from None
        if found.version != version:
            raise Missing(f"{path}: of version {found.version}, expected {version}")
        if any(block.owner != rank for block in found.blocks):
            raise Corrupted(f"{path}: has blocks of another rank than {rank}")
        tensors, below = found.tensors, found.base
        for block, digest in zip(found.blocks, found.hashes, strict=True):
            digests.setdefault(tensors[block.tensor].name, []).append(
                (block, bytes.fromhex(digest))
            )
    for tensor in tensors:
        if sum(size(b, tensor.columns) for b, _ in digests.get(tensor.name, ())) != tensor.size:
            raise Corrupted(f"{folder}: the ranks' hashes don't cover {tensor.name} exactly once")
    return tensors, digests, below


def differing(
    patterns: np.ndarray, tensor: Tensor, digests: Iterable[tuple[Block, bytes]]
) -> Block | None:
    """The first block of `digests` whose hash is not that of the tensor's `patterns`, (size,)
    integers of its width; null if all are as they should be."""
    for block, digest in digests:
        if digest_of(patterns, block, tensor.columns) != digest:
            return block
    return None
