"""Read versions outside a run, as the export of a model's folder does: list a store's versions,
link a copy that the trainer can't remove, and keep the hashes of published weights in checkpoints.
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

Digests = list[tuple[Block, bytes]]  # a tensor's blocks with the xxh3-128 of each


def readable(store: Path) -> list[int]:
    """Return, in order, the versions that can be read from a store's files alone; [] if it is no
    store. Their files may still be damaged."""
    while True:
        try:
            manifests = list(Path(store).glob(f"v*/*/{MANIFEST}"))
            break
        except FileNotFoundError:
            continue  # The trainer has removed a version meanwhile.
    steps = (parse_edge(path.parent.parent.name, path.parent.name) for path in manifests)
    edges = {step for step in steps if step is not None}
    found = {version for version, base in edges if base is FULL}
    for version, base in sorted(edge for edge in edges if edge[1] not in (FULL, INITIAL)):
        if base in found:
            found.add(version)
    return sorted(found) if (Path(store) / PLAN).is_file() else []


def linked(store: Path, folder: Path, version: int) -> Path:
    """Make `folder`, which must not exist, a store of hard links to all files of `store`, and
    return it. It keeps files that the trainer removes later, and copies no bytes. Return `store`
    itself if the links don't lead to `version`, as on a file system without hard links."""
    try:
        shutil.copytree(store, folder, copy_function=os.link, ignore=shutil.ignore_patterns(".*"))
    except shutil.Error:
        pass  # A version was just removed, or the file system has no hard links.
    except OSError:
        return store
    return folder if version in readable(folder) else store


class Hashes(msgspec.Struct, frozen=True, omit_defaults=True):
    """The hashes of the blocks of a version that a trainer rank wrote."""

    format: int
    version: int
    tensors: list[Tensor]  # all tensors of the model
    blocks: list[Block]
    hashes: list[str]  # xxh3-128 of each block, in hex
    base: Base | None = None  # the weights below the tensors if they are an adapter's


def hashes_file(folder: Path, rank: int) -> Path:
    return Path(folder) / f"weights-{rank:05d}.json"


def write_hashes(
    folder: Path, rank: int, plan: Plan, version: int, digests: Mapping[int, bytes]
) -> None:
    """Write this rank's hashes of a version. `digests` has the xxh3-128 of each of its blocks, by
    the block's number in the plan. Raises `TransferError`."""
    blocks = [plan.blocks[number] for number in digests]
    hashes = [d.hex() for d in digests.values()]
    found = Hashes(FORMAT, version, plan.tensors, blocks, hashes, plan.base)
    write_file(hashes_file(folder, rank), seal(found))


def read_hashes(
    folder: Path, ranks: int, version: int
) -> tuple[list[Tensor], dict[str, Digests], Base | None]:
    """Return the published tensors, their digests by name, and the base of an adapter. Raises
    `Missing` if a rank's file does not exist, and `Corrupted` if one is damaged."""
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
    """Return the first block whose hash in `digests` isn't that of the tensor's `patterns`, (size,)
    integers of its width, or None if all hashes match."""
    for block, digest in digests:
        if digest_of(patterns, block, tensor.columns) != digest:
            return block
    return None
