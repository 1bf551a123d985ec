"""Bytes on a stream socket: a frame is its length (uint32, little-endian), then the bytes.

A reader gives the most bytes that it takes, so that garbage asks for no memory. Deadlines are the
caller's: `asyncio.timeout` around `read`, `select` or a socket's timeout around `Frames.take`.
"""

from __future__ import annotations

import asyncio
import socket
import struct

_LENGTH = struct.Struct("<I")
_READ_BYTES = 2**20


class FrameError(ValueError):
    """A frame longer than its reader takes."""


def frame(data: bytes | bytearray) -> bytes:
    return _LENGTH.pack(len(data)) + data


def _length(header: bytes | bytearray, limit: int) -> int:
    (length,) = _LENGTH.unpack_from(header)
    if length > limit:
        raise FrameError(f"a frame of {length} bytes is announced; at most {limit} are taken")
    return length


async def read(reader: asyncio.StreamReader, limit: int) -> bytes:
    """The next frame. Raises `FrameError`, `asyncio.IncompleteReadError` where the stream ends."""
    return await reader.readexactly(_length(await reader.readexactly(_LENGTH.size), limit))


class Frames:
    """What arrives through a socket, in whole frames of `limit` bytes at most."""

    def __init__(self, channel: socket.socket, limit: int) -> None:
        self._channel, self._limit = channel, limit
        self._received = bytearray()

    def take(self) -> list[bytes] | None:
        """Receive once; the frames that are whole by that, maybe none. None: the peer has closed
        its end. Raises `FrameError`."""
        chunk = self._channel.recv(_READ_BYTES)
        if not chunk:
            return None
        self._received += chunk
        whole = []
        while len(self._received) >= _LENGTH.size:
            end = _LENGTH.size + _length(self._received, self._limit)
            if len(self._received) < end:
                break
            whole.append(bytes(self._received[_LENGTH.size : end]))
            del self._received[:end]
        return whole
