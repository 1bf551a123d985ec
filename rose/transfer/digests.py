"""Compute the xxh3-128 of blocks of the live parameters, on their GPU or in host memory.

A GPU hashes a block in place (rose/transfer/xxh3_triton.py) if the block is one run of 8-byte
words, or rows of such runs. The few other blocks are copied to the host, such as one where a ZeRO
shard ends within a row of an engine rank's part. The first block that a device hashes is hashed on
the host, too. If the hashes differ or Triton fails, one warning is logged, and the host hashes all.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Protocol

import numpy as np
import torch

from rose.transfer.base import Base, xxh3
from rose.transfer.errors import TransferError
from rose.transfer.live import Live, Place, one_run

# Blocks, and so warps, of one kernel launch. Each warp reads 1 KiB at a time, so the launch leaves
# most of the device to the engine's kernels.
BLOCKS_PER_LAUNCH = 512
BATCH = 8  # blocks that a thread of the host hashes at a time
LONG = 240  # bytes up to which XXH3 has other forms
# xxHash's default secret (XXH3_kSecret).
SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671f"
    "cb79e64eccc0e578825ad07dccff7221b8084674f743248ee03590e6813a264c"
    "3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364"
    "eac5ac8334d3ebc3c581a0fffa1363eb170ddd51b7f0da49d316552629d4689e"
    "2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
PRIME_1, PRIME_2 = 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F  # XXH_PRIME64_1, XXH_PRIME64_2
LANES = (  # the initial values of XXH3's eight lanes
    *(0xC2B2AE3D, PRIME_1, PRIME_2, 0x165667B19E3779F9),
    *(0x85EBCA77C2B2AE63, 0x85EBCA77, 0x27D4EB2F165667C5, 0x9E3779B1),
)

# A block's address, 8-byte words in a row, bytes from row to row, and words in all.
Run = tuple[int, int, int, int]

log = logging.getLogger(__name__)


class _Trust:
    """`right` is None until a device has hashed a block, then true if the host hashed it alike."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.right: bool | None = None


trust = _Trust()


class Values(Protocol):
    """Blocks of values that are hashed where they are: those of live parameters, or a trainer's."""

    on_gpu: bool
    device: torch.device
    at_once: int  # blocks of one kernel launch

    def side_stream(self) -> AbstractContextManager: ...

    def run(self, block: int) -> Run | None:
        """Return where a block is on the device, or None if it is neither a run of words nor rows
        of such runs (`run_of`)."""

    def view(self, block: int) -> np.ndarray:
        """Return a block's patterns in host memory, without a copy if they are there."""

    def name(self, block: int) -> str:
        """Return the name of the block's parameter."""


class _Placed:
    """The `Values` of blocks that are at `places` of live parameters."""

    at_once = BLOCKS_PER_LAUNCH

    def __init__(self, live: Live, places: Mapping[int, Place]):
        self._live, self._places = live, places
        self.on_gpu, self.device, self.side_stream = live.on_gpu, live.device, live.side_stream

    def run(self, block: int) -> Run | None:
        place = self._places[block]
        matrix = self._live.matrices[place.parameter]
        columns, width = matrix.shape[1], matrix.element_size()
        first = place.rectangles[0]
        nbytes, begin = place.size * width, first.first_row * columns + first.first_column
        address = matrix.data_ptr() + begin * width
        if one_run(place, columns):
            row, stride = nbytes, 0
        elif len(place.rectangles) == 1:
            row, stride = (first.last_column - first.first_column) * width, columns * width
        else:
            return None
        return run_of(address, row, stride, nbytes)

    def view(self, block: int) -> np.ndarray:
        return self._live.view(self._places[block])

    def name(self, block: int) -> str:
        return self._places[block].parameter


def digests(
    live: Live, places: Mapping[int, Place], threads: int, tick: Callable[[], None] = lambda: None
) -> dict[int, bytes]:
    """Return each block's digest, as `xxhash.xxh3_128_digest` computes it for the patterns'
    little-endian bytes. `tick` is called repeatedly and may raise to cancel the computation."""
    return digests_of(_Placed(live, places), places, threads, tick)


def digests_of(
    values: Values, blocks: Iterable[int], threads: int, tick: Callable[[], None] = lambda: None
) -> dict[int, bytes]:
    """Return the digest of each block of any `Values`, as `digests` does."""
    found: dict[int, bytes] = {}
    blocks = list(blocks)
    if hashes_on_device(values):
        runs = {block: run for block in blocks if (run := values.run(block)) is not None}
        try:
            found = _device_digests(values, runs, tick)
        except _DeviceError as error:
            trust.right = False
            log.warning("blocks are read back to be hashed: %s", error)
    rest = [block for block in blocks if block not in found]

    def read(some: list[int]) -> list[bytes]:
        with values.side_stream():
            made = []
            for block in some:
                tick()
                made.append(xxh3(values.view(block)))
            return made

    batches = [rest[low : low + BATCH] for low in range(0, len(rest), BATCH)]
    with ThreadPoolExecutor(threads, "digests") as pool:
        # An error ends `map`, which cancels the other batches.
        for some, made in zip(batches, pool.map(read, batches), strict=True):
            found |= zip(some, made, strict=True)
    return found


def hashes_on_device(values: Live | Values) -> bool:
    """True if a device hashes the blocks, which is fast and needs no copy in host memory."""
    return values.on_gpu and trust.right is not False


def compare(
    base: Base,
    places: Mapping[int, Place],
    live: Live,
    threads: int,
    folder: str,
    wanted: Callable[[], bool],
    end: float,
) -> None:
    """Compare the live parameters, which were read from `folder`, with an adapter's base. Raises
    `TransferError` if they differ, if `wanted` returns false, or after the monotonic time `end`."""

    def tick() -> None:
        if not wanted():
            raise TransferError(
                f"the comparison of {folder} with the trainer's base model is not wanted any more"
            )
        if time.monotonic() > end:
            raise TransferError(
                f"{folder} was not compared with the trainer's base model within "
                "transfer.load_timeout_s; raise it, or look at what slows this machine"
            )

    found = digests(live, places, threads, tick)
    wrong = [number for number in places if found[number].hex() != base.hashes[number]]
    if wrong:
        name = base.tensors[base.blocks[wrong[0]].tensor].name
        raise TransferError(
            f"the adapter is for another base model: {len(wrong)} of {len(places)} blocks of "
            f"{folder} are not the trainer's, first one of {name}; give this engine the model's "
            "folder that the trainer has"
        )


class _DeviceError(Exception):
    """A device can't hash, or hashes wrongly."""


def _device_digests(
    values: Values, runs: Mapping[int, Run], tick: Callable[[], None]
) -> dict[int, bytes]:
    """Return the digests of the blocks in `runs`. Raises `_DeviceError`, and what `tick` raises."""
    blocks = list(runs)
    found: dict[int, bytes] = {}
    for low in range(0, len(blocks), values.at_once):
        tick()
        some = blocks[low : low + values.at_once]
        table = np.array([runs[block] for block in some], np.int64)
        try:
            with values.side_stream():
                lanes = _lanes(values.device, table)
        except Exception as error:  # exceptions of Triton, compilers and drivers
            first = str(error).strip().partition("\n")[0]
            raise _DeviceError(
                f"Triton fails on {values.device}: {type(error).__name__}: {first}"
            ) from error
        found |= zip(some, merged(lanes, 8 * table[:, 3].astype(np.uint64)), strict=True)
        with trust.lock:
            if trust.right is None:
                _check_device(values, some[0], found[some[0]])
    return found


def _check_device(values: Values, block: int, found: bytes) -> None:
    """Trust the device if the host hashes the block alike; else raise `_DeviceError`."""
    with values.side_stream():
        wanted = xxh3(values.view(block))
    if found != wanted:
        raise _DeviceError(
            f"{values.device} hashes a block of {values.name(block)} to {found.hex()}, the host to "
            f"{wanted.hex()}"
        )
    trust.right = True


def _lanes(device: torch.device, blocks: np.ndarray) -> np.ndarray:
    """Return XXH3's lanes (n, 8) uint64 of blocks (n, 4), each a `Run`."""
    from rose.transfer import xxh3_triton  # Only torch for GPUs comes with Triton.

    there = torch.from_numpy(blocks).to(device)
    table = torch.from_numpy(_table().view(np.int64)).to(device)
    return xxh3_triton.accumulate(there, table).cpu().numpy().view(np.uint64)


def run_of(address: int, row: int, stride: int, nbytes: int) -> Run | None:
    """Return a block's `Run`, or None if it is too short or isn't aligned to words. `row`, `stride`
    and `nbytes` are the bytes of a row, from row to row, and in all."""
    if nbytes <= LONG or any(number % 8 for number in (address, row, stride, nbytes)):
        return None
    return address, row // 8, stride, nbytes // 8


# ----------------------------------------------------------------- XXH3's end, for many blocks


def _table() -> np.ndarray:
    """Return the table (40,) uint64 for `xxh3_triton.accumulate`."""
    words, last = np.frombuffer(SECRET, "<u8"), np.frombuffer(SECRET[121:185], "<u8")
    return np.concatenate([words, last, np.array(LANES, np.uint64)])


def merged(lanes: np.ndarray, nbytes: np.ndarray) -> list[bytes]:
    """Return the digests of blocks, given their lanes (n, 8) uint64 and lengths (n,) uint64."""
    low = _merge(lanes, SECRET[11:75], nbytes * np.uint64(PRIME_1))
    high = _merge(lanes, SECRET[117:181], ~(nbytes * np.uint64(PRIME_2)))
    both = np.stack([high, low], axis=1).astype(">u8")
    return [row.tobytes() for row in both]


def _merge(lanes: np.ndarray, secret: bytes, start: np.ndarray) -> np.ndarray:
    """Return one half of the digests: the merge of their lanes in XXH3."""
    keyed = lanes ^ np.frombuffer(secret, "<u8")
    for pair in range(0, 8, 2):
        start = start + _folded(keyed[:, pair], keyed[:, pair + 1])
    start = (start ^ (start >> np.uint64(37))) * np.uint64(0x165667919E3779F9)
    return start ^ (start >> np.uint64(32))


def _folded(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return the XOR of the two halves of the 128-bit products."""
    half, mask = np.uint64(32), np.uint64(0xFFFFFFFF)
    (a_high, a_low), (b_high, b_low) = (a >> half, a & mask), (b >> half, b & mask)
    cross, across = a_high * b_low, a_low * b_high
    middle = (a_low * b_low >> half) + (cross & mask) + (across & mask)
    high = a_high * b_high + (cross >> half) + (across >> half) + (middle >> half)
    return (a * b) ^ high
