"""How one tensor becomes named byte streams and back.

Only `dense` lives here: the raw little-endian bytes. A codec that differences against a base fills
the same two functions and is registered in `CODECS` under the name that the manifest stores.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import xxhash

Streams = dict[str, np.ndarray]  # stream name -> (n,) uint8


class Codec(Protocol):
    name: str

    def encode(self, array: np.ndarray, base: np.ndarray | None) -> Streams:
        """`array` in the bits to keep; `base` the same tensor in the base version, or null."""

    def decode(self, streams: Streams, shape: tuple[int, ...], dtype: np.dtype, base: np.ndarray | None) -> np.ndarray:
        """Bit-identical inverse of `encode`. Raises `ValueError` when the streams don't fit shape and dtype."""


class Dense:
    """The tensor as it is, whatever the base."""

    name = "dense"

    def encode(self, array: np.ndarray, base: np.ndarray | None) -> Streams:
        return {"data": as_bytes(array)}

    def decode(self, streams: Streams, shape: tuple[int, ...], dtype: np.dtype, base: np.ndarray | None) -> np.ndarray:
        return streams["data"].view(dtype).reshape(shape)


CODECS: dict[str, Codec] = {codec.name: codec for codec in (Dense(),)}


def as_bytes(array: np.ndarray) -> np.ndarray:
    """Any contiguous array -> (nbytes,) uint8 view."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def digest(array: np.ndarray) -> str:
    """xxh3-128 of the array's bytes, 32 hex digits."""
    return xxhash.xxh3_128_hexdigest(as_bytes(array))
