"""What becomes of one block of values, bit-exact: a payload, from and against the block's older
values.

Values are the bit patterns of bfloat16 (uint16) or float32 (uint32). The smallest of four encodings
is taken: unchanged; delta (which values changed, as Golomb-Rice coded gaps or, where that is
smaller, a bitmask, and the integer differences of their patterns in the order of the floats); dense
(sign and mantissa as they are, exponents Rice coded by rank); raw. docs/format.md has every byte.
All functions are pure and safe to call from threads; the loops release the GIL. Left out: entropy
coders that decode one symbol after the other (a GPU could not), and hashes: a wrong payload raises
`ValueError` or gives some array, never more, so callers check what they got.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import xxhash

from rose.transfer import payload as layouts
from rose.transfer.payload import Delta, Dense, Info, Layout, Plain, Subset

DTYPES = {2: np.dtype(np.uint16), 4: np.dtype(np.uint32)}  # width in bytes -> patterns

__all__ = [
    "DTYPES",
    "Info",
    "apply",
    "as_bytes",
    "changes",
    "compile_all",
    "compose",
    "decode",
    "digest",
    "encode",
    "info",
    "moved",
]


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

    Without `old` the payload is dense or raw. Raises `ValueError` if the two differ in shape or
    type.
    """
    new = _block(new)
    if old is None:
        return _encode_dense(new)
    old = _block(old)
    if old.shape != new.shape or old.dtype != new.dtype:
        raise ValueError(
            f"new values {new.shape} {new.dtype}, old values {old.shape} {old.dtype}: both must be "
            "the same"
        )
    positions, differences = np.empty(new.size, np.int32), np.empty(new.size, np.int32)
    count = _loops().scan(new, old, positions, differences)
    delta = _Measured(new.size, new.itemsize, positions[:count], differences[:count])
    if not layouts.beats_dense(delta.layout):
        dense = _dense_layout(new)
        if dense.nbytes < delta.layout.nbytes:
            return _write_dense(dense, new)
    return delta.write()


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
    if isinstance(layout, Dense):
        return _read_dense(layout, data)
    if layout.kind == layouts.RAW:
        return _raw(layout, data).copy()
    if isinstance(layout, Plain):
        return np.array(old)
    positions, differences = _read_delta(layout, data)
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
        positions, differences = _read_delta(layout, data)
        if values.flags.aligned:
            _loops().add(values, positions, differences, positions.size)
        else:
            moved = values.copy()
            _loops().add(moved, positions, differences, positions.size)
            values[:] = moved
    elif isinstance(layout, Dense):
        values[:] = _read_dense(layout, data)
    elif layout.kind == layouts.RAW:
        values[:] = _raw(layout, data)


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
        return _encode_dense(values)
    (positions, differences), (more, moves) = (
        _read_changes(layout, data),
        _read_changes(next_layout, next_data),
    )
    at, sums = (np.empty(positions.size + more.size, np.int32) for _ in range(2))
    count = _loops().merge(positions, differences, more, moves, layout.width * 8, at, sums)
    return _Measured(layout.values, layout.width, at[:count], sums[:count]).write()


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


class _Measured:
    """A delta whose parameters are chosen and whose size is known, before a byte is written."""

    def __init__(self, total: int, width: int, positions: np.ndarray, differences: np.ndarray):
        loops = _loops()
        count = positions.size
        self._differences = differences
        mask, self._coded = _measure_subset(total, positions)
        large, excess = np.empty(count + 1, np.int32), np.empty(count + 1, np.int32)
        lengths, sizes = np.zeros(33, np.int64), np.zeros(3, np.int64)
        found = loops.split(differences, count, large, excess, lengths)
        self._excess = excess[:found]
        k = layouts.excess_k(lengths.tolist())
        loops.excess_sizes(self._excess, found, k, sizes)
        which, self._coded_large = _measure_subset(count, large[:found])
        self.layout = layouts.best_delta(
            width, mask, which, layouts.measured_excess(found, k, *sizes.tolist())
        )

    def write(self) -> np.ndarray:
        layout, loops, differences = self.layout, _loops(), self._differences
        words = _start(layout)
        if isinstance(layout, Delta):
            (
                mask,
                mask_remainders,
                signs,
                large,
                large_remainders,
                unary,
                remainders,
                escapes,
                _,
            ) = layout.offsets
            loops.write_gaps(
                self._coded, self._coded.size, layout.mask.k, words, mask, mask_remainders
            )
            if layout.large is None:
                loops.write_plain(differences, differences.size, layout.width * 8, words, signs)
            else:
                loops.write_signs(differences, differences.size, words, signs)
                loops.write_gaps(
                    self._coded_large,
                    self._coded_large.size,
                    layout.large.k,
                    words,
                    large,
                    large_remainders,
                )
                loops.write_excess(
                    self._excess,
                    self._excess.size,
                    layout.excess.k,
                    layout.excess.escape_bits,
                    words,
                    unary,
                    remainders,
                    escapes,
                )
        return words.view(np.uint8)


def _measure_subset(total: int, positions: np.ndarray) -> tuple[Subset, np.ndarray]:
    """How to code the chosen positions, and the positions to code: theirs, or the others'."""
    chosen = positions.size
    if Subset(total, chosen).complement:
        others = np.empty(total - chosen, np.int32)
        _loops().complement(positions, chosen, total, others)
        positions = others
    coded = positions.size
    first = layouts.first_k(int(positions[-1]) + 1 - coded if coded else 0, coded)
    quotients = np.zeros(layouts.CANDIDATES, np.int64)
    _loops().gap_quotients(positions, coded, first, quotients)
    return layouts.best_subset(total, chosen, first, quotients.tolist()), positions


def _read_subset(subset: Subset, words: np.ndarray, unary: int, remainders: int) -> np.ndarray:
    coded = np.empty(subset.coded, np.int32)
    if not _loops().read_gaps(
        words, unary, subset.unary_bits, remainders, subset.k, subset.coded, subset.total, coded
    ):
        raise ValueError(f"a payload whose gaps are not {subset.coded} items of {subset.total}")
    if not subset.complement:
        return coded
    chosen = np.empty(subset.chosen, np.int32)
    _loops().complement(coded, subset.coded, subset.total, chosen)
    return chosen


def _read_changes(layout: Layout, data: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    if isinstance(layout, Delta):
        return _read_delta(layout, data)
    return np.empty(0, np.int32), np.empty(0, np.int32)


def _read_delta(layout: Delta, data: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    loops, words = _loops(), data.view(np.uint64)
    (mask, mask_remainders, signs, large, large_remainders, unary, remainders, escapes, _) = (
        layout.offsets
    )
    positions = _read_subset(layout.mask, words, mask, mask_remainders)
    differences = np.empty(positions.size, np.int32)
    if layout.large is None:
        loops.read_plain(words, signs, positions.size, layout.width * 8, differences)
        return positions, differences
    loops.read_signs(words, signs, positions.size, differences)
    which = _read_subset(layout.large, words, large, large_remainders)
    excess = layout.excess
    if not loops.read_excess(
        words,
        unary,
        excess.unary_bits,
        remainders,
        excess.k,
        escapes,
        excess.escape_bits,
        excess.escapes,
        layout.width * 8,
        which,
        excess.count,
        differences,
    ):
        raise ValueError(
            f"a payload whose differences are not {excess.count} of at most {layout.width * 8} bits"
        )
    return positions, differences


def _dense_layout(values: np.ndarray) -> Dense | Plain:
    counts = np.zeros(1024, np.int64)
    _loops().exponent_counts(values, counts)
    return layouts.best_dense(values.itemsize, counts.reshape(256, 4).sum(1).tolist())


def _encode_dense(values: np.ndarray) -> np.ndarray:
    return _write_dense(_dense_layout(values), values)


def _write_dense(layout: Dense | Plain, values: np.ndarray) -> np.ndarray:
    words = _start(layout)
    data = words.view(np.uint8)
    if isinstance(layout, Plain):
        data[layouts.WORD : layouts.WORD + values.nbytes] = as_bytes(values)
        return data
    ranks = np.zeros(256, np.uint8)
    ranks[np.frombuffer(layout.exponents, np.uint8)] = np.arange(len(layout.exponents))
    halves, planes, unary, remainders, _ = layout.offsets
    _loops().write_dense(
        values, ranks, layout.k, data, halves // 8, planes // 8, words, unary, remainders
    )
    return data


def _read_dense(layout: Dense, data: np.ndarray) -> np.ndarray:
    loops = _loops()
    values, quotients = (
        np.empty(layout.values, DTYPES[layout.width]),
        np.empty(layout.values + 8, np.uint8),
    )
    halves, planes, unary, remainders, _ = layout.offsets
    exponents = np.frombuffer(layout.exponents, np.uint8)
    well = loops.read_quotients(data, unary // 8, layout.unary_bits, quotients)
    if well and layout.k:
        well = loops.append_remainders(data, data.view(np.uint64), remainders, layout.k, quotients)
    if not (
        well and loops.read_dense(data, halves // 8, planes // 8, quotients, exponents, values)
    ):
        raise ValueError(
            f"a payload whose exponents are not {layout.values} of {exponents.size} different ones"
        )
    return values


def _raw(layout: Plain, data: np.ndarray) -> np.ndarray:
    return data[layouts.WORD : layouts.WORD + layout.values * layout.width].view(
        DTYPES[layout.width]
    )


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
