"""What becomes of one block of values, bit-exact: a payload, from and against the block's older
values.

Values are the bit patterns of bfloat16 (uint16) or float32 (uint32). The smallest of four encodings
is taken: unchanged; delta (which values changed, as Golomb-Rice coded gaps, and the integer
differences of their patterns in the order of the floats); planes (first and second bytes of all
values apart, compressed by zstandard); raw. The docstring of payload.py has every byte. All
functions are pure and safe to call from threads; the loops release the GIL. Left out: hashes. A
wrong payload raises `ValueError` or gives some array, never more, so callers check what they got.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import xxhash
import zstandard

from rose.transfer import payload as layouts
from rose.transfer.payload import Delta, Info, Layout, Plain, Rice

DTYPES = {2: np.dtype(np.uint16), 4: np.dtype(np.uint32)}  # width in bytes -> patterns
LEVEL = 1  # of zstandard; on weights the higher ones are slower, and larger by some percent
SAMPLE = 4096  # numbers, at least, that a Rice parameter is guessed from; then exact sizes decide
NOTHING = np.empty(0, np.int32)
NUMBERS = ("changed positions", "large differences", "magnitudes")  # a delta's streams
RISING = (1, 1, 0)  # whether what lies between neighbours is coded


@cache
def _loops():
    """The compiled loops, at first use: numba takes 0.4 s to import."""
    from rose.transfer import rice

    return rice


def compile_all() -> None:
    """Compile every loop now (10 s of CPU time) or find it in numba's cache beside the source."""
    _loops()


def encode(new: np.ndarray, old: np.ndarray | None) -> np.ndarray:
    """Patterns (n,) uint16 or uint32, and the same block's older ones -> payload (bytes,) uint8.

    Without `old` the payload is planes or raw. Raises `ValueError` if the two differ in shape or
    type.
    """
    new = _block(new)
    if old is None:
        return _encode_whole(new)
    old = _block(old)
    if old.shape != new.shape or old.dtype != new.dtype:
        raise ValueError(
            f"new values {new.shape} {new.dtype}, old values {old.shape} {old.dtype}: both must be "
            "the same"
        )
    positions, differences = np.empty(new.size, np.int32), np.empty(new.size, np.int32)
    count = _loops().scan(new, old, positions, differences)
    delta = _encode_delta(new.size, new.itemsize, positions[:count], differences[:count])
    if 2 * delta.size <= new.nbytes:  # planes of weights are not that small
        return delta
    return min(delta, _encode_whole(new), key=len)


def decode(payload, old: np.ndarray | None = None) -> np.ndarray:
    """The new values (n,) of a payload (bytes-like or (bytes,) uint8).

    Raises `ValueError` if the payload is malformed, or needs the older values and these are missing
    or don't fit.
    """
    data, layout = _parse(payload)
    if old is not None:
        _check_base(layout, old)
    elif layouts.info(layout).needs_base:
        raise ValueError(f"a payload of kind {layouts.info(layout).kind} needs the older values")
    if not layouts.info(layout).needs_base:
        return _read_whole(layout, data)
    positions, differences = _read_changes(layout, data)
    new = np.array(old)
    _loops().add(new, positions, differences, positions.size)
    return new


def apply(payload, values: np.ndarray) -> None:
    """Turn the older values into the new ones in place; contiguous, writable. On `ValueError` they
    are untouched."""
    data, layout = _parse(payload)
    _check_base(layout, values)
    if not (values.flags.c_contiguous and values.flags.writeable):
        raise ValueError("values are changed in place: they must be contiguous and writable")
    if isinstance(layout, Delta):
        positions, differences = _read_changes(layout, data)
        if values.flags.aligned:
            _loops().add(values, positions, differences, positions.size)
        else:
            moved = values.copy()
            _loops().add(moved, positions, differences, positions.size)
            values[:] = moved
    elif not layouts.info(layout).needs_base:
        values[:] = _read_whole(layout, data)


def compose(first, second) -> np.ndarray:
    """Payload of a -> c from those of a -> b and b -> c, without any values. What changes back
    vanishes.

    Raises `ValueError` if either is malformed or they are of different blocks.
    """
    data, layout = _parse(first)
    next_data, next_layout = _parse(second)
    if (layout.width, layout.values) != (next_layout.width, next_layout.values):
        raise ValueError(
            f"payloads of {layout.values} values of {layout.width} bytes and of "
            f"{next_layout.values} "
            f"values of {next_layout.width} bytes are not of the same block"
        )
    if not layouts.info(next_layout).needs_base:
        return _as_payload(second).copy()
    if not layouts.info(layout).needs_base:
        values = decode(first)
        apply(second, values)
        return _encode_whole(values)
    parts = _read_changes(layout, data), _read_changes(next_layout, next_data)
    positions, differences = (np.concatenate(part) for part in zip(*parts, strict=True))
    order = np.argsort(positions, kind="stable")
    positions, differences = positions[order], differences[order].astype(np.int64)
    starts = np.flatnonzero(np.diff(positions, prepend=-1))
    unused = 64 - layout.width * 8
    sums = (
        (np.add.reduceat(differences, starts) if starts.size else differences) << unused >> unused
    )
    at, sums = positions[starts][sums != 0], sums[sums != 0].astype(np.int32)
    return _encode_delta(layout.values, layout.width, at, sums)


def info(payload) -> Info:
    """What a payload's header says. Raises `ValueError` if that is malformed."""
    return layouts.info(_parse(payload)[1])


def changes(payload) -> tuple[np.ndarray, np.ndarray]:
    """Positions (c,) int32, ascending, and differences (c,) int32 of a delta, or of an unchanged
    block (none).

    Raises `ValueError` for other kinds and for malformed payloads.
    """
    data, layout = _parse(payload)
    if not layouts.info(layout).needs_base:
        raise ValueError(f"a payload of kind {layouts.info(layout).kind} has no differences")
    return _read_changes(layout, data)


def moved(old: np.ndarray, differences: np.ndarray) -> np.ndarray:
    """The patterns (c,) that are so many steps (c,) int32 after `old` (c,): what `changes` says of
    these values."""
    new = np.array(old)
    _loops().add(new, np.arange(old.size, dtype=np.int32), differences, old.size)
    return new


def as_bytes(array: np.ndarray) -> np.ndarray:
    """Any contiguous array -> (nbytes,) uint8 view."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def digest(array: np.ndarray) -> str:
    """xxh3-128 of the array's bytes, 32 hex digits."""
    return xxhash.xxh3_128_hexdigest(as_bytes(array))


# --------------------------------------------------------------------------- deltas


def _encode_delta(
    total: int, width: int, positions: np.ndarray, differences: np.ndarray
) -> np.ndarray:
    """Of the ascending positions (c,) int32 and differences (c,) int32, none of them 0."""
    changed = positions.size
    if not changed:
        return _start(Plain(layouts.UNCHANGED, width, total)).view(np.uint8)
    large = np.flatnonzero((differences + 1).view(np.uint32) > 2).astype(np.int32)
    excess = (np.abs(differences[large].astype(np.int64)) - 2).astype(np.int32)
    numbers = _fewer(total, positions), _fewer(changed, large), excess
    streams = tuple(map(_measured, numbers, RISING))
    layout = Delta(width, total, changed, large.size, streams)
    words, at = _start(layout), layout.offsets
    signs = np.packbits(differences < 0, bitorder="little")
    words.view(np.uint8)[at[0] // 8 : at[0] // 8 + signs.size] = signs
    for i, (stream, rising) in enumerate(zip(streams, RISING, strict=True)):
        offsets = at[1 + 3 * i : 4 + 3 * i]
        _loops().write(numbers[i], rising, stream.k, stream.escape_bits, words, *offsets)
    return words.view(np.uint8)


def _fewer(total: int, positions: np.ndarray) -> np.ndarray:
    """The positions, or the other items of 0..total-1 where those are fewer."""
    return _others(total, positions) if 2 * positions.size > total else positions


def _others(total: int, positions: np.ndarray) -> np.ndarray:
    left = np.ones(total, bool)
    left[positions] = False
    return np.flatnonzero(left).astype(np.int32)


def _measured(numbers: np.ndarray, rising: int) -> Rice:
    """With the `k` that takes the fewest bits of the likely one and its neighbours."""
    at = np.arange(0, numbers.size, max(1, numbers.size // SAMPLE))
    sample = numbers[at] - rising * np.where(at, numbers[at - 1] + 1, 0)
    likely = layouts.likely_k(np.bincount(np.frexp(sample.astype(np.float64))[1]).tolist())
    made, sizes = [], np.zeros(3, np.int64)
    for k in range(max(0, likely - 1), likely + 2):
        _loops().measure(numbers, rising, k, sizes)
        quotients, escapes, largest = sizes.tolist()
        escape_bits = (largest - layouts.ESCAPE).bit_length() if escapes else 0
        made.append(Rice(numbers.size, k, numbers.size + quotients, escapes, escape_bits))
    return min(made, key=lambda rice: sum(rice.sizes))


def _read_changes(layout: Layout, data: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Positions and differences; none of an unchanged block."""
    if not isinstance(layout, Delta):
        return NOTHING, NOTHING
    words, at = data.view(np.uint64), layout.offsets
    most = layout.values - 1, layout.changed - 1, 2 ** (8 * layout.width - 1) - 2
    read = [np.empty(stream.count, np.int32) for stream in layout.streams]
    for i, stream in enumerate(layout.streams):
        unary, remainders, escapes = at[1 + 3 * i : 4 + 3 * i]
        if not _loops().read(
            *(words, unary, stream.unary_bits, remainders, stream.k, escapes),
            *(stream.escape_bits, stream.escapes, most[i], RISING[i], read[i]),
        ):
            raise ValueError(
                f"a payload whose {NUMBERS[i]} are not {stream.count} of at most {most[i]}"
            )
    positions, large, excess = read
    if positions.size < layout.changed:
        positions = _others(layout.values, positions)
    if large.size < layout.large:
        large = _others(layout.changed, large)
    signs = data[at[0] // 8 : (at[1] + 7) // 8]
    differences = np.unpackbits(signs, count=layout.changed, bitorder="little").astype(np.int32)
    differences *= -2
    differences += 1  # a bit is set for -1
    differences[large] *= excess + 2
    return positions, differences


# --------------------------------------------------------------------------- whole values


def _encode_whole(values: np.ndarray) -> np.ndarray:
    planes = np.ascontiguousarray(as_bytes(values).reshape(-1, values.itemsize).T)
    packed = zstandard.ZstdCompressor(level=LEVEL).compress(planes)
    layout = Plain(layouts.PLANES, values.itemsize, values.size, len(packed))
    raw, body = Plain(layouts.RAW, values.itemsize, values.size), np.frombuffer(packed, np.uint8)
    if raw.nbytes <= layout.nbytes:
        layout, body = raw, as_bytes(values)
    data, begin = _start(layout).view(np.uint8), len(layout.header)
    data[begin : begin + body.size] = body
    return data


def _read_whole(layout: Plain, data: np.ndarray) -> np.ndarray:
    """Values (n,) of their own memory."""
    body, size = data[len(layout.header) :], layout.values * layout.width
    if layout.kind == layouts.PLANES:
        frame = body[: layout.packed].data
        try:  # the size first: a decompressor takes the memory that the frame asks for
            if (found := zstandard.frame_content_size(frame)) != size:
                raise ValueError(f"a payload of {size} bytes of planes, of which {found} are there")
            planes = np.frombuffer(zstandard.ZstdDecompressor().decompress(frame), np.uint8)
        except zstandard.ZstdError as error:
            raise ValueError(f"a payload whose planes are damaged: {error}") from None
        body = np.ascontiguousarray(planes.reshape(layout.width, layout.values).T).reshape(-1)
    return np.array(body[:size].view(DTYPES[layout.width]))


def _start(layout: Layout) -> np.ndarray:
    """The payload's words, zero but for the header."""
    words = np.zeros(layout.nbytes // layouts.WORD, np.uint64)
    header = layout.header
    words.view(np.uint8)[: len(header)] = np.frombuffer(header, np.uint8)
    return words


def _parse(payload) -> tuple[np.ndarray, Layout]:
    """The payload's bytes, aligned to words, and its layout."""
    data = _as_payload(payload)
    layout = layouts.parse(data[: layouts.HEADER_LIMIT].tobytes(), data.size)
    return (data if data.ctypes.data % layouts.WORD == 0 else data.copy()), layout


def _as_payload(payload) -> np.ndarray:
    data = payload if isinstance(payload, np.ndarray) else np.frombuffer(payload, np.uint8)
    if data.dtype != np.uint8 or data.ndim != 1:
        raise ValueError(f"a payload is one row of bytes, not {data.shape} {data.dtype}")
    return np.ascontiguousarray(data)


def _block(values: np.ndarray) -> np.ndarray:
    """Checked, contiguous and aligned."""
    if values.ndim != 1 or values.dtype not in DTYPES.values():
        raise ValueError(
            f"a block is one row of uint16 or uint32 patterns, not {values.shape} {values.dtype}"
        )
    if values.size > layouts.MAX_VALUES:
        raise ValueError(
            f"a block of {values.size} values; at most {layouts.MAX_VALUES} are allowed"
        )
    return np.require(values, requirements=["C", "A"])


def _check_base(layout: Layout, values: np.ndarray) -> None:
    if values.shape != (layout.values,) or values.dtype != DTYPES[layout.width]:
        raise ValueError(
            f"a payload of {layout.values} values of {DTYPES[layout.width]}, but the block is "
            f"{values.shape} {values.dtype}"
        )
