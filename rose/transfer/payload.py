"""The layout of a payload: its header, where each stream of bits starts, and the choice of Rice
parameters. docs/format.md has the overview and an example.

Integers are little-endian. A varint is an unsigned LEB128 integer in its shortest form. Bit i of a
payload is bit i mod 8 (0: the least significant) of byte i div 8; a number in a stream of bits has
its least significant bit first. Of n values, each a bit pattern of `width` bytes:

    byte 0, 1    0x52, version 2
    byte 2, 3    kind (0 unchanged, 1 delta, 2 planes, 3 raw), width (2 bfloat16, 4 float32)
    byte 4 ...   varint n, then the kind's own fields

Header and body are each filled with zeros up to a multiple of 8 bytes. A payload is malformed if
its length is not the header's, or if a bit between the header's fields and the body is set.

- Unchanged: no fields, no body.
- Raw: the body is the n patterns.
- Planes: varint c; the body is one Zstandard frame (RFC 8878) of c bytes. It states its content's
  size, n * width. Content: the lowest byte of every value, then the next ones, up to the highest.
- Delta: varints c (how many of the n values changed) and b (how many of the c differences are
  large: not 1 or -1), then k, u, e, f of each of three rows of numbers. b <= c <= n must hold.

With w = 8 * width and x a pattern as a signed integer, order(x) is x if x >= 0, else
x xor (2^(w-1) - 1), its own inverse. A difference is order(new) - order(old) modulo 2^w, in
-2^(w-1) ... 2^(w-1) - 1. Deltas of the same block compose without values: differences at equal
positions add up modulo 2^w, and a sum of zero is no change. A delta's streams follow one another
without gaps:

1. the c signs, 1 bit each: 1 if the difference is negative;
2. which of the n values changed;
3. which of the c differences are large;
4. the magnitude of each large difference, less 2; at most 2^(w-1) - 2.

In 2 and 3, p are the ascending positions of the chosen items, or of the other items if more than
half are chosen. The numbers are the gaps p[i] - p[i-1] - 1, with p[-1] = -1. Malformed: a position
at or beyond the row's end.

A row of m numbers v (2, 3, 4) is Golomb-Rice coded (Golomb 1966; Rice 1979) in three streams. With
q = v >> k, these are
- unary, u bits: min(q, 15) zeros and a one for each number;
- remainders, m * k bits: the k lowest bits of each number;
- escapes, e * f bits: q - 15 in f bits for each of the e numbers with q >= 15.
Malformed: k + f > 31, e > m, u outside m ... 16 * m, not m ones, a last bit that is not one, a
quotient above 15, not e escapes, a number above its maximum. An encoder may take any k.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, islice
from typing import ClassVar, NamedTuple

MAGIC, VERSION = 0x52, 2
UNCHANGED, DELTA, PLANES, RAW = range(4)
KINDS = ("unchanged", "delta", "planes", "raw")
WORD = 8  # bytes; header and payload are padded to whole words
MAX_VALUES = 1 << 27
ESCAPE = 15  # least quotient whose excess over this number is in the stream of escapes
HEADER_LIMIT = 64  # bytes; a delta has the longest header, of 56 bytes at most


class Info(NamedTuple):
    kind: str  # element of KINDS
    width: int  # bytes of a value: 2 or 4
    values: int
    changed: int | None  # changed values, or None for planes and raw
    needs_base: bool


@dataclass(frozen=True)
class Rice:
    """The layout of `count` Golomb-Rice coded numbers: quotients by 2^k in unary, remainders, and
    the excess of large quotients over `ESCAPE`."""

    count: int
    k: int = 0  # bits of a remainder
    unary_bits: int = 0
    escapes: int = 0
    escape_bits: int = 0  # bits of an escape

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Bits of the three streams: unary, remainders, escapes."""
        return self.unary_bits, self.count * self.k, self.escapes * self.escape_bits

    @property
    def fields(self) -> tuple[int, int, int, int]:
        return self.k, self.unary_bits, self.escapes, self.escape_bits

    def check(self) -> None:
        """Raise `ValueError` if the fields contradict each other."""
        if (
            self.k + self.escape_bits > 31
            or self.escapes > self.count
            or not self.count <= self.unary_bits <= self.count * (ESCAPE + 1)
        ):
            raise ValueError(
                f"{self.count} numbers in {self.unary_bits} unary bits, {self.k} bits a "
                f"remainder, {self.escapes} escapes of {self.escape_bits} bits"
            )


def coded(total: int, chosen: int) -> int:
    """Return how many gaps encode which of `total` items are chosen: one for each chosen item, or
    for each other item if these are fewer."""
    return min(chosen, total - chosen)


@dataclass(frozen=True)
class Delta:
    kind: ClassVar[int] = DELTA
    width: int
    values: int
    changed: int
    large: int  # differences other than 1 and -1
    streams: tuple[Rice, Rice, Rice]  # changed gaps, large gaps, large differences' magnitudes

    @cached_property
    def offsets(self) -> list[int]:
        """Bit offsets in the payload: the signs, three streams for each of `streams`, the end."""
        sizes = [size for stream in self.streams for size in stream.sizes]
        return list(accumulate([len(self.header) * 8, self.changed, *sizes]))

    @cached_property
    def nbytes(self) -> int:
        return padded((self.offsets[-1] + 7) // 8)

    @cached_property
    def header(self) -> bytes:
        fields = [field for stream in self.streams for field in stream.fields]
        return head(DELTA, self.width, [self.values, self.changed, self.large, *fields])


@dataclass(frozen=True)
class Plain:
    """The layout of an unchanged block, raw values, or planes compressed to `packed` bytes."""

    kind: int
    width: int
    values: int
    packed: int = 0

    @cached_property
    def nbytes(self) -> int:
        body = self.values * self.width if self.kind == RAW else self.packed
        return len(self.header) + padded(body)

    @cached_property
    def header(self) -> bytes:
        return head(self.kind, self.width, [self.values, self.packed][: 1 + (self.kind == PLANES)])


Layout = Plain | Delta


def info(layout: Layout) -> Info:
    changed = {DELTA: getattr(layout, "changed", None), UNCHANGED: 0}.get(layout.kind)
    return Info(KINDS[layout.kind], layout.width, layout.values, changed, changed is not None)


def padded(size: int) -> int:
    return -(-size // WORD) * WORD


def head(kind: int, width: int, fields: Sequence[int]) -> bytes:
    """Return a header, with `fields` as varints and zeros up to whole words."""
    made = bytearray((MAGIC, VERSION, kind, width))
    for field in fields:
        while field > 127:
            made.append(field & 127 | 128)
            field >>= 7
        made.append(field)
    return bytes(made) + bytes(padded(len(made)) - len(made))


def parse(start: bytes, size: int) -> Layout:
    """Return the layout of a payload of `size` bytes. `start` is its first `HEADER_LIMIT` bytes, or
    all of it. Raises `ValueError` if it has an unknown version or kind, contradicts itself, or is
    not `size` bytes long."""
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
    fields = _header_fields(start)
    values = next(fields)
    if values > MAX_VALUES:
        raise ValueError(f"a payload of {values} values; at most {MAX_VALUES} are allowed")
    if kind == DELTA:
        layout = _parse_delta(width, values, fields)
    else:
        layout = Plain(kind, width, values, next(fields) if kind == PLANES else 0)
    if layout.header != start[: len(layout.header)]:
        raise ValueError("a payload whose header is not in its shortest form")
    if layout.nbytes != size:
        raise ValueError(f"a payload of {size} bytes whose header says {layout.nbytes}")
    return layout


def _parse_delta(width: int, values: int, fields: Iterator[int]) -> Delta:
    changed, large = next(fields), next(fields)
    if not large <= changed <= values:
        raise ValueError(f"{large} large differences of {changed} of {values} values")
    counts = coded(values, changed), coded(changed, large), large
    streams = tuple(Rice(count, *islice(fields, 4)) for count in counts)
    for stream in streams:
        stream.check()
    return Delta(width, values, changed, large, streams)


def _header_fields(start: bytes) -> Iterator[int]:
    """Yield a header's unsigned LEB128 integers, from byte 4 on."""
    value = shift = 0
    for byte in start[4:]:
        if shift > 35:
            break
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            yield value
            value = shift = 0
    raise ValueError("a payload whose header is cut short")
