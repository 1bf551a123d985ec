"""Versions of weights: bit patterns, the codec's rivals, a store of tensors. Not a command."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import zstandard

from rose.transfer import codec
from scripts.harness import Failed

Patterns = np.ndarray  # (n,) uint16 or uint32


def last_versions(run: Path, count: int) -> tuple[Path, list[int]]:
    """Return the store of a run's last attempt, and its last `count` versions, which must be
    consecutive. Raises `Failed` if they are fewer or not consecutive."""
    from rose.transfer.versions import readable

    stores = sorted((run / "weights").glob("attempt-*"))
    found = readable(stores[-1]) if stores else []
    if len(found) < count or found[-1] - found[-count] != count - 1:
        raise Failed(
            f"{run}/weights has versions {found or 'none'}; {count}, one after the other, are "
            "needed: fewer --steps, or a run with a larger transfer.keep_versions"
        )
    return stores[-1], found[-count:]


def patterns(tensor) -> Patterns:
    """Return the bits of a tensor on the CPU, flat, as a view."""
    import torch

    wide = tensor.element_size() == 4
    bits = tensor.detach().reshape(-1).view(torch.int32 if wide else torch.int16).numpy()
    return bits.view(np.uint32 if wide else np.uint16)


# --------------------------------------------------------------------------- rivals of the codec


class Rival(NamedTuple):
    """A rival encoding, in numpy as in its source. `apply` changes the older values in place."""

    name: str
    encode: Callable[[Patterns, Patterns], Any]
    apply: Callable[[Any, Patterns], None]


def pack(*arrays: np.ndarray) -> bytes:
    """Join the arrays, each after its length, compressed by zstandard at level 1."""
    raw = [
        zstandard.ZstdCompressor(level=1).compress(np.ascontiguousarray(array).view(np.uint8).data)
        for array in arrays
    ]
    return b"".join(struct.pack("<Q", len(part)) + part for part in raw)


def unpack(data, *dtypes) -> list[np.ndarray]:
    parts, at = [], 0
    for dtype in dtypes:
        (size,) = struct.unpack_from("<Q", data, at)
        part, at = memoryview(data)[at + 8 : at + 8 + size], at + 8 + size
        parts.append(np.frombuffer(zstandard.ZstdDecompressor().decompress(part), dtype))
    return parts


def _apply_xor(data, values: Patterns) -> None:
    values ^= unpack(data, values.dtype)[0]


def byte_gaps(at: np.ndarray) -> np.ndarray:
    """Encode each gap in bytes. 255 means that 255 is added to the next byte."""
    gaps = np.diff(at, prepend=-1) - 1
    ends = np.cumsum(gaps // 255 + 1) - 1
    made: np.ndarray = np.full(int(ends[-1]) + 1 if ends.size else 0, 255, np.uint8)
    made[ends] = gaps % 255
    return made


def gap_positions(made: np.ndarray) -> np.ndarray:
    ends = np.flatnonzero(made != 255)
    return np.cumsum(made, dtype=np.int64)[ends] + np.arange(ends.size)


def _gaps(new: Patterns, old: Patterns) -> bytes:
    at = np.flatnonzero(new != old)
    return pack(byte_gaps(at), new[at] - old[at])


def _apply_gaps(data, values: Patterns) -> None:
    gaps, differences = unpack(data, np.uint8, values.dtype)
    values[gap_positions(gaps)] += differences


RIVALS = {
    "ours": Rival("ours", codec.encode, codec.apply),
    "xor": Rival("XOR + zstd-1", lambda new, old: pack(new ^ old), _apply_xor),
    "gapdiff": Rival("u8 gaps + int16 difference, zstd-1", _gaps, _apply_gaps),
}


class CodecOf:
    """A rival in place of `rose.transfer.codec`, with the functions that `publish` and `stage` use.
    "dense" sends whole values every time. The first byte of a payload is 1 if it needs a base."""

    class Info(NamedTuple):
        needs_base: bool

    def __init__(self, name: str) -> None:
        self._rival = RIVALS.get(name)

    def encode(self, new: Patterns, old: Patterns | None) -> np.ndarray:
        delta = old is not None and self._rival is not None
        body = self._rival.encode(new, old) if delta else new.tobytes()
        return np.frombuffer(bytes([delta, new.itemsize, 0, 0]) + body, np.uint8)

    def info(self, payload) -> Info:
        return self.Info(bool(payload[0]))

    def changes(self, payloads, *_) -> list[None]:
        """Return None for each block: no rival's payload is staged without the values."""
        return [None] * len(payloads)

    differences = staticmethod(codec.differences)

    def decode(self, payload) -> Patterns:
        return np.frombuffer(payload, f"<u{payload[1]}", offset=4).copy()

    def apply(self, payload, values: Patterns) -> None:
        if self.info(payload).needs_base:
            self._rival.apply(memoryview(payload)[4:], values)
        else:
            values[:] = self.decode(payload)


# --------------------------------------------------------------------------- a store


class Alone:
    """The `rose.transfer.publish.Peers` of a single rank."""

    rank, world = 0, 1

    def barrier(self) -> None:
        pass

    def sum(self, value: int) -> int:
        return value


class Whole:
    """A publisher of `tensors`, whole ones on the CPU, which its owner may replace between
    versions. Each rank writes its blocks. `shape`: the model's, cut for engines of these
    tensor-parallel `degrees`. `base`: the frozen weights below an adapter."""

    def __init__(
        self, store: Path, tensors: dict, shape, degrees=(1, 2), peers=None, base=None
    ) -> None:
        from rose.engine import layout
        from rose.transfer.blocks import Tensor, cut
        from rose.transfer.publish import Publisher
        from rose.transfer.store import FORMAT, Plan

        self.store, self.tensors, peers = store, tensors, peers or Alone()
        listed = [
            Tensor(name, tuple(t.shape), str(t.dtype).removeprefix("torch."))
            for name, t in tensors.items()
        ]
        cuts = {t.name: layout.cuts(t.name, t.shape, shape, degrees) for t in listed}
        blocks = cut(listed, cuts, None, peers.world)
        self._plan = Plan(FORMAT, "", peers.world, listed, blocks, base)
        share = max(1, threads() // peers.world)
        args = (self._plan, peers, self._read, share, 10**9, 4, 600.0)
        self._publisher = Publisher(store, *args)

    def publish(self, version: int):
        return self._publisher.publish(version)

    def _read(self, block) -> Patterns:
        from rose.transfer.blocks import take

        tensor = self._plan.tensors[block.tensor]
        pieces = take(patterns(self.tensors[tensor.name]), 0, block, tensor.columns)
        flat = [piece.reshape(-1) for piece in pieces]
        return np.concatenate(flat) if len(flat) > 1 else flat[0]


def threads(most: int = 8) -> int:
    return min(most, len(os.sched_getaffinity(0)))
