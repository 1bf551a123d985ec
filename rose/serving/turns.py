"""What a lender and the online engine say to each other where one engine serves both sides (lending.same_weights).

    POST /rose/turns          `Turn` -> frames of `Chunk`, the last with `finish`, or of one `Failure`
    POST /rose/abort          `Abort` -> nothing
    POST /rose/load_version   `Load` -> `Loaded`
    POST /rose/begin_anew     nothing -> `State`: the folder's own weights again, no turn left
    GET  /rose/state          `State`

Bodies are msgpack; a frame is its length (4 bytes, big endian) and its msgpack. With a status other than 200 comes a
`Failure`.
Every request shows the token of `Address`, which the server writes, anew at each start and with mode 0600, beside the
boards.
"""

from __future__ import annotations

import hmac
import json
import os
import secrets
import struct
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from rose.config import Transfer
from rose.engine.start import EngineError
from rose.engine.vllm_engine import Chunk, EngineDied, Stats
from rose.protocol import Sampling
from rose.transfer import TransferError

TURNS, ABORT, LOAD, ANEW, STATE = "/rose/turns", "/rose/abort", "/rose/load_version", "/rose/begin_anew", "/rose/state"
FILE = "turns.json"  # beside the boards
LARGEST = 2**26  # bytes of a frame: hundreds of times the longest turn
KINDS: dict[str, type[Exception]] = {"died": EngineDied, "transfer": TransferError, "engine": EngineError}

_LENGTH = struct.Struct(">I")


class Turn(msgspec.Struct):
    id: str
    tokens: bytes  # int32, packed
    sampling: Sampling


class Abort(msgspec.Struct):
    id: str


class Load(msgspec.Struct):
    version: int
    store: str
    transfer: Transfer
    mirror: str | None
    turn_timeout_s: float  # of a version that waits for the end of turns


class State(msgspec.Struct):
    server: int  # process of the HTTP server
    engine: int  # and of the engine
    model: str  # folder or hub id
    dtype: str
    max_context: int
    max_sequences: int
    kv_tokens: int
    hardware: str  # the device's name
    version: int
    open: bool
    stats: Stats


class Failure(msgspec.Struct):
    kind: Literal["died", "transfer", "engine", "request"]
    text: str


class Address(NamedTuple):
    url: str
    token: str

    @property
    def header(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.token}"}

    def shown(self, authorization: str | None) -> bool:
        """Whether the header's value is this token's."""
        return hmac.compare_digest((authorization or "").encode(errors="replace"), f"Bearer {self.token}".encode())


def publish(folder: Path, url: str) -> Address:
    """A new token, in `folder` for those who may read there."""
    address, part = Address(url, secrets.token_hex(32)), folder / f"{FILE}.part"
    part.unlink(missing_ok=True)
    with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        json.dump(address._asdict(), file)
    part.replace(folder / FILE)
    return address


def find(folder: Path) -> Address:
    """Raises `EngineError` when there is none."""
    try:
        return Address(**json.loads((folder / FILE).read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise EngineError(f"{folder / FILE}: {error}; is the online server up, with serving.lending.same_weights=true"
                          "?") from None


def failure(error: Exception) -> Failure:
    kind = next((name for name, of in KINDS.items() if isinstance(error, of)), "engine")
    return Failure(kind, str(error) if isinstance(error, KINDS[kind]) else f"{type(error).__name__}: {error}")


def error_of(found: Failure) -> Exception:
    return KINDS.get(found.kind, EngineError)(found.text)


def frame(message: Chunk | Failure) -> bytes:
    data = msgspec.msgpack.encode(message)
    return _LENGTH.pack(len(data)) + data


class Frames:
    """Cuts a stream of bytes into messages."""

    def __init__(self) -> None:
        self._left = bytearray()
        self._decoder = msgspec.msgpack.Decoder(Chunk | Failure)

    def feed(self, data: bytes) -> list[Chunk | Failure]:
        """What is complete now. Raises `ValueError` for bytes that are no frames."""
        self._left += data
        found = []
        while len(self._left) >= _LENGTH.size:
            (size,) = _LENGTH.unpack_from(self._left)
            if size > LARGEST:
                raise ValueError(f"a frame of {size} bytes, over {LARGEST}: not an answer to {TURNS}")
            end = _LENGTH.size + size
            if len(self._left) < end:
                break
            found.append(self._decoder.decode(self._left[_LENGTH.size:end]))  # msgspec's errors are ValueErrors
            del self._left[:end]
        return found
