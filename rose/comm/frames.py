"""Send messages through a stream socket as frames: a length (uint32, little-endian), then bytes.

A reader bounds the length of a frame, so that garbage can't make it allocate memory. The caller
sets deadlines: `asyncio.timeout` around `read`, `select` or a socket timeout for `Frames.take`.
"""

from __future__ import annotations

import asyncio
import socket
import struct

_LENGTH = struct.Struct("<I")
_READ_BYTES = 2**20


class FrameError(ValueError):
    """A frame is longer than its reader accepts."""


def frame(data: bytes | bytearray) -> bytes:
    return _LENGTH.pack(len(data)) + data


def _checked_length(header: bytes | bytearray, limit: int) -> int:
    (length,) = _LENGTH.unpack_from(header)
    if length > limit:
        raise FrameError(f"a frame of {length} bytes is announced; at most {limit} are taken")
    return length


async def read(reader: asyncio.StreamReader, limit: int) -> bytes:
    """Return the next frame. Raises `FrameError` if it is too long, `asyncio.IncompleteReadError`
    if the stream ends first."""
    return await reader.readexactly(_checked_length(await reader.readexactly(_LENGTH.size), limit))


class Frames:
    """Assembles the frames that arrive through a socket, each of `limit` bytes at most."""

    def __init__(self, channel: socket.socket, limit: int) -> None:
        self._channel, self._limit = channel, limit
        self._received = bytearray()

    def take(self) -> list[bytes] | None:
        """Receive once and return the frames that are complete, or None if the peer has closed.
        Raises `FrameError` if a frame is too long."""
        chunk = self._channel.recv(_READ_BYTES)
        if not chunk:
            return None
        self._received += chunk
        whole = []
        while len(self._received) >= _LENGTH.size:
            end = _LENGTH.size + _checked_length(self._received, self._limit)
            if len(self._received) < end:
                break
            whole.append(bytes(self._received[_LENGTH.size : end]))
            del self._received[:end]
        return whole
