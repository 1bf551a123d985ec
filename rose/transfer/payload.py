"""The layout of a payload (docs/format.md): its header, where each bit stream starts, and the
choices of parameters.

Everything that is decided from what the codec (`rose.transfer.codec`) measured of the values is
here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, NamedTuple

MAGIC, VERSION = 0x52, 1
UNCHANGED, DELTA, DENSE, RAW = range(4)
KINDS = ("unchanged", "delta", "dense", "raw")
WORD = 8  # bytes; header and payload are padded to whole words
MAX_VALUES = 1 << 27
ESCAPE = 15  # quotient of an excess from which on the rest stands in the overflow stream
CANDIDATES = 4  # remainder widths tried for gaps
HEADER_LIMIT = 512  # bytes; the longest, dense with 256 exponents, is under 280


class Info(NamedTuple):
    kind: str  # one of KINDS
    width: int  # bytes of a value: 2 or 4
    values: int
    changed: int | None  # of unchanged and delta
    needs_base: bool


@dataclass(frozen=True)
class Subset:
    """`chosen` of `total` items: Golomb-Rice coded gaps, of the other items where those are
    fewer."""

    total: int
    chosen: int
    k: int = 0  # bits of a remainder
    unary_bits: int = 0

    @property
    def complement(self) -> bool:
        return 2 * self.chosen > self.total

    @property
    def coded(self) -> int:
        return self.total - self.chosen if self.complement else self.chosen

    @property
    def remainder_bits(self) -> int:
        return self.coded * self.k

    def check(self) -> None:
        if self.chosen > self.total:
            raise ValueError(f"{self.chosen} of {self.total} items are chosen")
        if (
            self.k > 27
            or not self.coded <= self.unary_bits <= self.coded + (self.total >> self.k)
            or not self.coded
            and (self.k or self.unary_bits)
        ):
            raise ValueError(
                f"{self.coded} gaps within {self.total} items in {self.unary_bits} unary bits, "
                f"{self.k} bits a remainder"
            )


@dataclass(frozen=True)
class Excess:
    """What `count` magnitudes are above 2, Rice coded with escape."""

    count: int
    k: int = 0
    unary_bits: int = 0
    escapes: int = 0
    escape_bits: int = 0  # bits of an escaped quotient less ESCAPE

    @property
    def bits(self) -> int:
        return self.unary_bits + self.count * self.k + self.escapes * self.escape_bits

    def check(self) -> None:
        if (
            self.k + self.escape_bits > 31
            or self.escapes > self.count
            or not self.count <= self.unary_bits <= self.count * (ESCAPE + 1)
        ):
            raise ValueError(
                f"{self.count} magnitudes in {self.unary_bits} unary bits, {self.k} bits a "
                f"remainder, {self.escapes} escapes of {self.escape_bits} bits"
            )


@dataclass(frozen=True)
class Delta:
    kind: ClassVar[int] = DELTA
    width: int
    mask: Subset
    large: Subset | None = (
        None  # which differences are not 1 or -1; None: differences are plain integers
    )
    excess: Excess | None = None  # of the large ones; None with `large`

    @property
    def values(self) -> int:
        return self.mask.total

    @cached_property
    def offsets(self) -> list[int]:
        """Bit offsets in the payload: mask unary, mask remainders, differences or signs, large
        unary, large remainders, excess unary, excess remainders, escapes, end."""
        changed = self.mask.chosen
        sizes = [len(self.header) * 8, self.mask.unary_bits, self.mask.remainder_bits]
        if self.large is None:
            sizes += [changed * self.width * 8, 0, 0, 0, 0, 0]
        else:
            sizes += [
                changed,
                self.large.unary_bits,
                self.large.remainder_bits,
                self.excess.unary_bits,
                self.excess.count * self.excess.k,
                self.excess.escapes * self.excess.escape_bits,
            ]
        return running(sizes)

    @cached_property
    def nbytes(self) -> int:
        return pad((self.offsets[-1] + 7) // 8)

    @cached_property
    def header(self) -> bytes:
        fields = [self.values, self.mask.chosen, self.mask.k, self.mask.unary_bits]
        if self.large is None:
            fields += [0]
        else:
            fields += [
                1,
                self.large.chosen,
                self.large.k,
                self.large.unary_bits,
                self.excess.k,
                self.excess.unary_bits,
                self.excess.escapes,
                self.excess.escape_bits,
            ]
        return head(DELTA, self.width, fields)


@dataclass(frozen=True)
class Dense:
    kind: ClassVar[int] = DENSE
    width: int
    values: int
    exponents: bytes  # those that occur, the most frequent first
    k: int = 0
    unary_bits: int = 0

    @property
    def planes(self) -> int:
        """Bytes before the exponents' streams: sign and mantissa of every value."""
        return self.values * (self.width - 1)

    @cached_property
    def offsets(self) -> list[int]:
        """Bit offsets in the payload: low halves (fp32 only), sign and mantissa bytes, unary,
        remainders, end."""
        return running(
            [
                len(self.header) * 8,
                self.values * (self.width - 2) * 8,
                self.values * 8,
                self.unary_bits,
                self.values * self.k,
            ]
        )

    @cached_property
    def nbytes(self) -> int:
        return pad((self.offsets[-1] + 7) // 8)

    @cached_property
    def header(self) -> bytes:
        return head(
            DENSE,
            self.width,
            [self.values, self.k, self.unary_bits, len(self.exponents)],
            self.exponents,
        )


@dataclass(frozen=True)
class Plain:
    """Unchanged, or the values' bytes as they are."""

    kind: int
    width: int
    values: int

    @cached_property
    def nbytes(self) -> int:
        return WORD + (pad(self.values * self.width) if self.kind == RAW else 0)

    @cached_property
    def header(self) -> bytes:
        return head(self.kind, self.width, [self.values])


Layout = Plain | Delta | Dense


def info(layout: Layout) -> Info:
    changed = (
        layout.mask.chosen if isinstance(layout, Delta) else 0 if layout.kind == UNCHANGED else None
    )
    return Info(KINDS[layout.kind], layout.width, layout.values, changed, changed is not None)


def pad(size: int) -> int:
    return -(-size // WORD) * WORD


def running(sizes: Sequence[int]) -> list[int]:
    sums = [0]
    for size in sizes:
        sums.append(sums[-1] + size)
    return sums[1:]


def head(kind: int, width: int, fields: Sequence[int], tail: bytes = b"") -> bytes:
    made = bytearray((MAGIC, VERSION, kind, width))
    for field in fields:
        while field > 127:
            made.append(field & 127 | 128)
            field >>= 7
        made.append(field)
    made += tail
    return bytes(made) + bytes(pad(len(made)) - len(made))


def parse(start: bytes, size: int) -> Layout:
    """The layout that a payload of `size` bytes states; `start` is its first `HEADER_LIMIT` bytes,
    or all of it.

    Raises `ValueError` if it is of no known version or kind, contradicts itself, or is not `size`
    bytes long.
    """
    if size < WORD or size % WORD:
        raise ValueError(f"a payload of {size} bytes; they are whole words of {WORD}")
    if start[0] != MAGIC or start[1] != VERSION:
        raise ValueError(
            f"a payload that begins with {start[:2].hex(' ')}; version {VERSION} begins with "
            f"{MAGIC:02x} {VERSION:02x}"
        )
    kind, width = start[2], start[3]
    if kind >= len(KINDS) or width not in (2, 4):
        raise ValueError(
            f"a payload of kind {kind} and width {width}; kinds are 0 to 3, widths 2 and 4"
        )
    fields = _Fields(start)
    values = fields.next()
    if values > MAX_VALUES:
        raise ValueError(f"a payload of {values} values; at most {MAX_VALUES} are allowed")
    if kind == DELTA:
        layout = _delta(width, values, fields)
    elif kind == DENSE:
        k, unary_bits, count = fields.next(), fields.next(), fields.next()
        if k > 7 or not values <= unary_bits <= values * 256 or count > 256:
            raise ValueError(
                f"{values} exponents of {count} different ones in {unary_bits} unary bits, {k} "
                "bits a remainder"
            )
        layout = Dense(width, values, fields.bytes(count), k, unary_bits)
    else:
        layout = Plain(kind, width, values)
    if layout.header != start[: len(layout.header)]:
        raise ValueError("a payload whose header is not in its shortest form")
    if layout.nbytes != size:
        raise ValueError(f"a payload of {size} bytes whose header says {layout.nbytes}")
    return layout


def _delta(width: int, values: int, fields: _Fields) -> Delta:
    mask = Subset(values, *fields.take(3))
    mask.check()
    mode = fields.next()
    if mode == 0:
        return Delta(width, mask)
    if mode != 1:
        raise ValueError(f"differences of mode {mode}; modes are 0 and 1")
    large = Subset(mask.chosen, *fields.take(3))
    large.check()
    excess = Excess(large.chosen, *fields.take(4))
    excess.check()
    return Delta(width, mask, large, excess)


class _Fields:
    """Unsigned LEB128 integers from byte 4 on."""

    def __init__(self, start: bytes):
        self._start, self._at = start, 4

    def next(self) -> int:
        value = shift = 0
        while True:
            if self._at >= len(self._start) or shift > 35:
                raise ValueError("a payload whose header is cut short")
            byte = self._start[self._at]
            self._at += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    def take(self, count: int) -> list[int]:
        return [self.next() for _ in range(count)]

    def bytes(self, count: int) -> bytes:
        self._at += count
        if self._at > len(self._start):
            raise ValueError("a payload whose header is cut short")
        return self._start[self._at - count : self._at]


def first_k(gaps: int, coded: int) -> int:
    """The least of the `CANDIDATES` remainder widths tried for `coded` gaps that sum to `gaps`.

    Rice's best width is near log2(mean * ln 2); the best of the four is taken by exact size, the
    least on ties.
    """
    return max(0, (gaps // coded).bit_length() - CANDIDATES + 1) if coded else 0


def best_subset(total: int, chosen: int, first: int, quotients: Sequence[int]) -> Subset:
    """`quotients[i]`: sum of the gaps' quotients with remainders of `first + i` bits."""
    made = [Subset(total, chosen, first + i, quotient) for i, quotient in enumerate(quotients)]
    coded = made[0].coded
    best = min(made, key=lambda subset: subset.unary_bits + subset.remainder_bits)
    return (
        Subset(total, chosen, best.k, best.unary_bits + coded) if coded else Subset(total, chosen)
    )


def excess_k(lengths: Sequence[int]) -> int:
    """Remainder width for magnitudes of which `lengths[i]` are `i` bits long, each taken as 1.5 *
    2^(i-1).

    Not by the mean: a few values that cross zero differ by thousands and would decide for all.
    """
    present = [(i, count) for i, count in enumerate(lengths) if count]
    if not present:
        return 0
    longest = present[-1][0]

    def bits(k: int) -> int:
        escape_bits = max(0, longest - k - 3)
        total = 0
        for length, count in present:
            quotient = (3 << length >> 2) >> k
            total += count * (1 + k + (quotient if quotient < ESCAPE else ESCAPE + escape_bits))
        return total

    return min(range(longest + 1), key=bits)


def measured_excess(count: int, k: int, quotients: int, escapes: int, largest: int) -> Excess:
    """`quotients`: their sum, each at most `ESCAPE`; `largest` of them as they are."""
    return Excess(
        count, k, count + quotients, escapes, (largest - ESCAPE).bit_length() if escapes else 0
    )


def best_delta(width: int, mask: Subset, large: Subset, excess: Excess) -> Delta | Plain:
    """Differences split into signs and magnitudes, or plain where that is smaller."""
    if mask.chosen == 0:
        return Plain(UNCHANGED, width, mask.total)
    split, plain = Delta(width, mask, large, excess), Delta(width, mask)
    return split if split.nbytes <= plain.nbytes else plain


def beats_dense(delta: Delta | Plain) -> bool:
    """Whether no dense payload can be smaller: of a dense value the exponent alone shrinks, to one
    bit at least."""
    return delta.nbytes <= delta.values * (delta.width - 1) + delta.values // 8


def best_dense(width: int, counts: Sequence[int]) -> Dense | Plain:
    """`counts[e]`: how many values have the exponent `e`. Ties go to the lesser exponent, the
    lesser k and raw."""
    ranked = sorted((e for e in range(256) if counts[e]), key=lambda e: (-counts[e], e))
    values = sum(counts)
    unary = [
        values + sum(counts[e] * (rank >> k) for rank, e in enumerate(ranked)) for k in range(8)
    ]
    k = min(range(8), key=lambda k: unary[k] + k * values)
    dense, raw = Dense(width, values, bytes(ranked), k, unary[k]), Plain(RAW, width, values)
    return dense if dense.nbytes < raw.nbytes else raw
