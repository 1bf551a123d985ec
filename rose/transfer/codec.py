"""Encode a block of values bit-exactly as a payload, relative to the block's older values.

Values are the bit patterns of bfloat16 (uint16) or float32 (uint32). A payload is the smallest of
four encodings: unchanged, delta, planes and raw. payload.py's docstring specifies every byte.

All functions are pure and thread-safe, and their loops release the GIL. Payloads have no hashes. A
wrong payload raises `ValueError` or decodes to wrong values, so callers check the values' hashes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import numpy as np
import xxhash
import zstandard

from rose.transfer import payload as layouts
from rose.transfer.payload import Delta, Info, Layout, Plain

# The types of patterns and of differences, by their width in bytes.
DTYPES: dict[int, np.dtype] = {2: np.dtype(np.uint16), 4: np.dtype(np.uint32)}
SIGNED: dict[int, np.dtype] = {2: np.dtype(np.int16), 4: np.dtype(np.int32)}
LEVEL = 1  # zstandard's level; on weights the higher ones are slower, and larger by some percent
NOTHING = np.empty(0, np.int32)
NUMBERS = ("changed positions", "large differences", "magnitudes")  # a delta's streams


@cache
def _loops():
    """Import the compiled loops at first use, because numba takes 0.4 s to import."""
    from rose.transfer import rice

    return rice


def compile_all() -> None:
    """Compile every loop now (10 s of CPU time) or load it from numba's cache beside the source."""
    _loops()


def encode(new: np.ndarray, old: np.ndarray | None) -> np.ndarray:
    """Return the payload (bytes,) uint8 of a block's patterns (n,) uint16 or uint32, given older
    ones. Without `old` it is planes or raw. Raises `ValueError` if shapes or types differ."""
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
    return encode_moves(new.size, new.itemsize, positions[:count], differences[:count], lambda: new)


def encode_moves(
    total: int,
    width: int,
    positions: np.ndarray,
    differences: np.ndarray,
    values: Callable[[], np.ndarray],
) -> np.ndarray:
    """Return the payload that `encode` returns, for a block of `total` values of `width` bytes,
    given its changes: ascending positions (c,) int32 and their differences (c,), none of them 0.
    `values()` returns the new patterns (n,), which are needed if many values change."""
    delta = encode_changes(total, width, positions, differences)
    if 2 * delta.size <= total * width:  # Planes of weights are never that small.
        return delta
    return min(delta, _encode_whole(values()), key=len)


def decode(payload, old: np.ndarray | None = None) -> np.ndarray:
    """Return the new values (n,) of a payload (bytes-like or (bytes,) uint8). Raises `ValueError`
    if the payload is malformed, or if it needs `old`, which is missing or doesn't fit."""
    if old is not None:
        new = np.array(old)
        apply(payload, new)
        return new
    data, layout = _parse(payload)
    if layouts.info(layout).needs_base:
        raise ValueError(f"a payload of kind {layouts.info(layout).kind} needs the older values")
    return _read_whole(layout, data)


def apply(payload, values: np.ndarray) -> None:
    """Turn the older values, contiguous and writable, into the new ones in place. They are
    unchanged if it raises `ValueError`."""
    data, layout = _parse(payload)
    _check_base(layout, values)
    if not (values.flags.c_contiguous and values.flags.writeable):
        raise ValueError("values are changed in place: they must be contiguous and writable")
    if isinstance(layout, Delta):
        positions, differences = _read_changes(layout, data)
        if values.flags.aligned:
            _loops().add(values, positions, differences, 1)
        else:
            moved = values.copy()
            _loops().add(moved, positions, differences, 1)
            values[:] = moved
    elif not layouts.info(layout).needs_base:
        values[:] = _read_whole(layout, data)


def compose(first, second) -> np.ndarray:
    """Return the payload from a to c, given those from a to b and from b to c, without any values.

    Values that are equal in a and c count as unchanged. Raises `ValueError` if a payload is
    malformed, or if the payloads are of different blocks."""
    data, layout = _parse(first)
    next_data, next_layout = _parse(second)
    if (layout.width, layout.values) != (next_layout.width, next_layout.values):
        raise ValueError(
            f"payloads of {layout.values} values of {layout.width} bytes and of "
            f"{next_layout.values} values of {next_layout.width} bytes are not of the same block"
        )
    if not layouts.info(next_layout).needs_base:
        return _as_payload(second).copy()
    if not layouts.info(layout).needs_base:
        values = decode(first)
        apply(second, values)
        return _encode_whole(values)
    parts = _read_changes(layout, data), _read_changes(next_layout, next_data)
    positions, differences = (np.concatenate(part) for part in zip(*parts, strict=True))
    moves = summed(positions, differences, layout.width)
    return encode_changes(layout.values, layout.width, *moves)


def summed(
    positions: np.ndarray, differences: np.ndarray, width: int
) -> tuple[np.ndarray, np.ndarray]:
    """Combine successive changes of a block into one. `positions` and `differences` are those of
    all changes in a row. Differences at equal positions add up; a sum of 0 is left out. Returns
    ascending positions (c,) int32 and differences (c,) int32."""
    order = np.argsort(positions, kind="stable")
    positions, differences = positions[order], differences[order].astype(np.int64)
    starts = np.flatnonzero(np.diff(positions, prepend=-1))
    unused = 64 - width * 8
    sums = (
        (np.add.reduceat(differences, starts) if starts.size else differences) << unused >> unused
    )
    return positions[starts][sums != 0], sums[sums != 0].astype(np.int32)


def info(payload) -> Info:
    """Return what a payload's header states. Raises `ValueError` if it is malformed."""
    return layouts.info(_parse(payload)[1])


def changes(
    payloads: Sequence,
    width: int,
    values: Sequence[int],
    most: Sequence[int],
    shifts: Sequence[int],
) -> list[tuple[np.ndarray, np.ndarray] | None]:
    """Decode the deltas of several blocks in one call, which takes the GIL a few times in all.

    For each block return its ascending positions (c,) int32, with its shift added, and its
    differences (c,); c is 0 if it is unchanged. Differences are int16 for values of 2 bytes and
    int32 for those of 4. A block has None if its payload is of another kind, size or `width`, has
    more than `most` changes, or is malformed. `apply` takes any kind and number of changes, and
    raises the reason if the payload is malformed or of another size or width."""
    chosen, rows, begin = [], [], 0
    for i, (payload, total, limit) in enumerate(zip(payloads, values, most, strict=True)):
        try:
            layout = layouts.parse(bytes(payload[: layouts.HEADER_LIMIT]), len(payload))
        except ValueError:
            continue
        found = layouts.info(layout)
        if (found.width, found.values) != (width, total) or found.changed is None:
            continue
        if found.changed <= limit:
            chosen.append(i)
            rows.append(_fields(layout, begin))
            begin += len(payload)
    decoded: list[tuple[np.ndarray, np.ndarray] | None] = [None] * len(payloads)
    if not chosen:
        return decoded
    words = np.frombuffer(b"".join([payloads[i] for i in chosen]), np.uint64)
    fields: np.ndarray = np.array(rows)
    ends = fields[:, 2].cumsum()
    positions: np.ndarray = np.empty(ends[-1], np.int32)
    differences: np.ndarray = np.empty(ends[-1], SIGNED[width])
    added: np.ndarray = np.array(shifts, np.int64)[chosen]
    counts = fields[:, 2].tolist()
    _loops().decode_deltas(words, fields, added, ends, positions, differences)
    for i, first, count, end in zip(chosen, fields[:, 0], counts, ends.tolist(), strict=True):
        if first >= 0:
            decoded[i] = positions[end - count : end], differences[end - count : end]
    return decoded


def differences(new: np.ndarray, old: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the positions (c,) int32 at which two blocks' patterns (n,) differ, and the
    differences (c,), of the types that `changes` returns."""
    positions: np.ndarray = np.empty(new.size, np.int32)
    found: np.ndarray = np.empty(new.size, np.int32)
    count = _loops().scan(new, old, positions, found)
    return positions[:count].copy(), found[:count].astype(SIGNED[new.itemsize])


def move(values: np.ndarray, indices: np.ndarray, by: np.ndarray, sign: int) -> None:
    """Add `sign`, 1 or -1, times the differences `by` (c,) to the contiguous patterns `values`
    (n,), in the order of the floats. `indices` (c,), int32 or int64, are the positions."""
    _loops().add(values.view(DTYPES[values.itemsize]), indices, by, sign)


def as_bytes(array: np.ndarray) -> np.ndarray:
    """Return a contiguous array as an (nbytes,) uint8 view."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def digest(array: np.ndarray) -> str:
    """Return the xxh3-128 of the array's bytes as 32 hex digits."""
    return xxhash.xxh3_128_hexdigest(as_bytes(array))


# --------------------------------------------------------------------------- deltas


def encode_changes(
    total: int, width: int, positions: np.ndarray, differences: np.ndarray
) -> np.ndarray:
    """Return the delta (bytes,) uint8 of a block of `total` values of `width` bytes. They change at
    ascending positions (c,) int32 by differences (c,), none of them 0."""
    if not positions.size:
        return _start(Plain(layouts.UNCHANGED, width, total)).view(np.uint8)
    differences = differences.astype(np.int32, copy=False)
    return _loops().encode_delta(positions, differences, total, width).view(np.uint8)


def _read_changes(layout: Layout, data: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return positions and differences, which are empty for an unchanged block."""
    if not isinstance(layout, Delta):
        return NOTHING, NOTHING
    fields = _fields(layout, 0)
    positions: np.ndarray = np.empty(layout.changed, np.int32)
    differences: np.ndarray = np.empty(layout.changed, np.int32)
    found = _loops().decode_delta(data.view(np.uint64), np.array(fields), positions, differences)
    if found:
        most = layout.values - 1, layout.changed - 1, 2 ** (8 * layout.width - 1) - 2
        raise ValueError(
            f"a payload whose {NUMBERS[found - 1]} are not {layout.streams[found - 1].count} of "
            f"at most {most[found - 1]}"
        )
    return positions, differences


def _fields(layout: Layout, begin: int) -> list[int]:
    """Return the 29 integers that describe a payload, which begins at byte `begin`, to
    `decode_delta`. An unchanged block is a delta without changes."""
    if not isinstance(layout, Delta):
        return [layout.values, 8 * layout.width, *[0] * 27]
    at = [8 * begin + offset for offset in layout.offsets]
    fields = [layout.values, 8 * layout.width, layout.changed, layout.large, at[0]]
    for i, stream in enumerate(layout.streams):
        fields += [stream.count, *stream.fields[:2], stream.escapes, stream.escape_bits]
        fields += at[1 + 3 * i : 4 + 3 * i]
    return fields


# --------------------------------------------------------------------------- whole values


def _encode_whole(values: np.ndarray) -> np.ndarray:
    """Return the payload of whole values: planes, or raw if that is not longer."""
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
    """Return the values (n,) in memory of their own."""
    body, size = data[len(layout.header) :], layout.values * layout.width
    if layout.kind == layouts.PLANES:
        frame = body[: layout.packed].data
        try:  # Check the size first, because the decompressor allocates what the frame states.
            if (found := zstandard.frame_content_size(frame)) != size:
                raise ValueError(f"a payload of {size} bytes of planes, of which {found} are there")
            planes = np.frombuffer(zstandard.ZstdDecompressor().decompress(frame), np.uint8)
        except zstandard.ZstdError as error:
            raise ValueError(f"a payload whose planes are damaged: {error}") from None
        body = np.ascontiguousarray(planes.reshape(layout.width, layout.values).T).reshape(-1)
    return np.array(body[:size].view(DTYPES[layout.width]))


def _start(layout: Layout) -> np.ndarray:
    """Return a payload's words with the header written, and zeros behind it."""
    words = np.zeros(layout.nbytes // layouts.WORD, np.uint64)
    header = layout.header
    words.view(np.uint8)[: len(header)] = np.frombuffer(header, np.uint8)
    return words


def _parse(payload) -> tuple[np.ndarray, Layout]:
    """Return the payload's bytes, aligned to words, and its layout."""
    data = _as_payload(payload)
    layout = layouts.parse(data[: layouts.HEADER_LIMIT].tobytes(), data.size)
    return (data if data.ctypes.data % layouts.WORD == 0 else data.copy()), layout


def _as_payload(payload) -> np.ndarray:
    data = payload if isinstance(payload, np.ndarray) else np.frombuffer(payload, np.uint8)
    if data.dtype != np.uint8 or data.ndim != 1:
        raise ValueError(f"a payload is one row of bytes, not {data.shape} {data.dtype}")
    return np.ascontiguousarray(data)


def _block(values: np.ndarray) -> np.ndarray:
    """Check a block's patterns and return them contiguous and aligned."""
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
