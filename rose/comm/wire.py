"""Encode and decode messages: a fixed header, then msgpack by msgspec. Nothing is ever unpickled.

The header has 12 bytes, little-endian: magic ``ROSE``, uint16 protocol version, uint16 zero, uint32
length of the body. Another protocol version, a truncated body or garbage raises `WireError` here,
and no other error later.
"""

from __future__ import annotations

import struct

import msgspec

from rose.protocol import PROTOCOL_VERSION, AnyMessage, Message

COORDINATOR = 0  # the coordinator's rank, which the launcher starts first
MAX_MESSAGE_BYTES = 256 * 2**20
_HEADER = struct.Struct("<4sHHI")
_MAGIC = b"ROSE"
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(AnyMessage)


class WireError(ValueError):
    """Bytes that are no message of this protocol version."""


def encode(message: Message) -> bytes:
    """Return the bytes of a message. Raises `WireError` if it is larger than a peer accepts."""
    body = _encoder.encode(message)
    if len(body) > MAX_MESSAGE_BYTES:
        raise WireError(
            f"{type(message).__name__} has {len(body)} bytes; at most {MAX_MESSAGE_BYTES} travel "
            "at once"
        )
    return _HEADER.pack(_MAGIC, PROTOCOL_VERSION, 0, len(body)) + body


def message_bytes(data: bytes | bytearray | memoryview) -> int:
    """Return the size of the message that begins with `data`, header included, in bytes. Raises
    `WireError` if `data` has no valid header."""
    if len(data) < _HEADER.size:
        raise WireError(f"{len(data)} bytes are too few for a message header of {_HEADER.size}")
    magic, version, _, length = _HEADER.unpack_from(data)
    if magic != _MAGIC:
        raise WireError(f"a message begins with {_MAGIC!r}, this one with {bytes(magic)!r}")
    if version != PROTOCOL_VERSION:
        raise WireError(
            f"the peer speaks protocol version {version}, this rank {PROTOCOL_VERSION}; run one "
            "release"
        )
    if length > MAX_MESSAGE_BYTES:
        raise WireError(
            f"the header promises {length} bytes; at most {MAX_MESSAGE_BYTES} travel at once"
        )
    return _HEADER.size + length


def decode(data: bytes | bytearray | memoryview) -> Message:
    """Return the message. Raises `WireError` on anything but one whole, valid message."""
    view = memoryview(data)
    if len(view) != (whole := message_bytes(view)):
        raise WireError(
            f"the header promises {whole - _HEADER.size} bytes, {len(view) - _HEADER.size} arrived"
        )
    try:
        return _decoder.decode(view[_HEADER.size :])
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError) as error:
        raise WireError(f"not a message of protocol version {PROTOCOL_VERSION}: {error}") from None
