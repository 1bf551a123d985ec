"""The codec's loops over values and bit streams, compiled by numba.

This module is imported only when a block is first encoded or decoded. The import loads numba and
compiles every function for its one or two signatures, or loads it from numba's cache. The functions
release the GIL and start no threads, because callers process blocks in threads. Streams have the
least significant bit first, in little-endian 64-bit words; `at` is a bit offset. `read` returns
False for a stream that contradicts its header, and writes nothing outside its array. All functions
and constants are in one file, because numba's cache detects changes of a function's own file only.
"""

from __future__ import annotations

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from rose.transfer import payload

ESCAPE = 15
assert ESCAPE == payload.ESCAPE
ONE = np.uint64(1)


def _array(dtype, readonly: bool = False):
    return types.Array(dtype, 1, "C", readonly=readonly)


BIT, INT = types.boolean, types.int64
HALVES, SINGLES, WORDS = (_array(t, True) for t in (types.uint16, types.uint32, types.uint64))
OUT_WORDS, INTS, LONGS = (_array(t) for t in (types.uint64, types.int32, types.int64))
READ_INTS = _array(types.int32, True)


def _compile(*signatures):
    return numba.njit(list(signatures), nogil=True, cache=True)


@intrinsic
def _zeros_below(_, word):
    """Count the trailing zeros of a word that is not zero."""

    def generate(context, builder, signature, args):
        return builder.cttz(args[0], ir.Constant(ir.IntType(1), 1))

    return types.int64(types.uint64), generate


@intrinsic
def _load(_, array, at):
    """Load eight bytes from byte `at` of an array, aligned or not."""

    def generate(context, builder, signature, args):
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        place = builder.gep(builder.bitcast(data, ir.IntType(8).as_pointer()), [args[1]])
        return builder.load(builder.bitcast(place, ir.IntType(64).as_pointer()), align=1)

    return types.uint64(array, types.int64), generate


@intrinsic
def _bits(_, array):
    """Return an item's bits as a constant, so that branches on it are resolved at compilation."""

    def generate(context, builder, signature, args):
        return context.get_constant(types.int64, array.dtype.bitwidth)

    return types.int64(array), generate


@numba.njit(inline="always")
def _difference(new, old, bits):
    """Return steps from `old` to `new` in the order of the floats, in [-2^(bits-1), 2^(bits-1))."""
    low = np.int64((1 << (bits - 1)) - 1)
    a, b = np.int64(new), np.int64(old)
    a ^= low & -(a >> (bits - 1))
    b ^= low & -(b >> (bits - 1))
    return ((a - b) << (64 - bits)) >> (64 - bits)


@numba.njit(inline="always")
def _moved(old, difference, bits):
    """Return the pattern `difference` steps after `old`; the inverse of `_difference`."""
    low = np.int64((1 << (bits - 1)) - 1)
    mask = np.int64((1 << bits) - 1)
    a = np.int64(old)
    a ^= low & -(a >> (bits - 1))
    a = (a + difference) & mask
    return a ^ (low & -(a >> (bits - 1)))


@numba.njit(inline="always")
def _peek(words, at, bits):
    """Return `bits` bits, 1 to 57, from bit `at` on, in one load that stays within the words."""
    byte = min(at >> 3, words.size * 8 - 8)
    return np.int64(
        (_load(words, byte) >> np.uint64(at - byte * 8)) & ((ONE << np.uint64(bits)) - ONE)
    )


@numba.njit(inline="always")
def _poke(words, at, bits, value):
    """Write `bits` bits, 1 to 63, at bit `at`, where the words must be zero."""
    index, shift = at >> 6, np.uint64(at & 63)
    words[index] |= np.uint64(value) << shift
    if np.int64(shift) + bits > 64:
        words[index + 1] |= np.uint64(value) >> (np.uint64(64) - shift)


@_compile(INT(HALVES, HALVES, INTS, INTS), INT(SINGLES, SINGLES, INTS, INTS))
def scan(new, old, positions, differences):
    """Write the positions at which two equally long blocks differ, and by how many steps. Return
    their count."""
    bits = _bits(new)
    lanes = 64 // bits
    high = np.uint64(0x8000800080008000) if bits == 16 else np.uint64(0x8000000080000000)
    shift = np.uint64(4 if bits == 16 else 5)
    group = 4 * lanes
    size = new.size
    count = 0
    for start in range(0, size - group + 1, group):
        at = start * (bits // 8)
        if (
            (_load(new, at) ^ _load(old, at))
            | (_load(new, at + 8) ^ _load(old, at + 8))
            | (_load(new, at + 16) ^ _load(old, at + 16))
            | (_load(new, at + 24) ^ _load(old, at + 24))
        ):
            for word in range(4):
                changed = _load(new, at + 8 * word) ^ _load(old, at + 8 * word)
                # Set the highest bit of each lane that differs.
                changed = (((changed & ~high) + ~high) | changed) & high
                while changed:
                    i = start + word * lanes + np.int64(np.uint64(_zeros_below(changed)) >> shift)
                    changed &= changed - ONE
                    positions[count] = i
                    differences[count] = _difference(new[i], old[i], bits)
                    count += 1
    for i in range(size - size % group, size):
        if new[i] != old[i]:
            positions[count] = i
            differences[count] = _difference(new[i], old[i], bits)
            count += 1
    return count


@_compile(types.void(READ_INTS, INT, INT, LONGS))
def measure(numbers, rising, k, sizes):
    """Write three numbers to `sizes`: the sum of the quotients by 2^k, each at most `ESCAPE`, the
    count of escapes, and the largest quotient. If `rising` is 1 and not 0, the numbers ascend and
    the gaps between neighbours are coded."""
    unary, escapes, largest, start = 0, 0, 0, 0
    for i in range(numbers.size):
        number = np.int64(numbers[i])
        quotient = (number - start) >> k
        start = (number + 1) * rising
        unary += min(quotient, ESCAPE)
        escapes += np.int64(quotient >= ESCAPE)
        largest = max(largest, quotient)
    sizes[0], sizes[1], sizes[2] = unary, escapes, largest


@_compile(types.void(READ_INTS, INT, INT, INT, OUT_WORDS, INT, INT, INT))
def write(numbers, rising, k, escape_bits, words, unary, remainders, escapes):
    """Write Rice coded numbers at the bit offsets of their three streams, which must be zero."""
    at, current, gathered, start = unary, unary >> 6, np.uint64(0), 0
    low = (1 << k) - 1
    word, filled, pending = remainders >> 6, remainders & 63, np.uint64(0)
    for i in range(numbers.size):
        number = np.int64(numbers[i]) - start
        start = (start + number + 1) * rising
        quotient = number >> k
        if quotient >= ESCAPE:
            if escape_bits:
                _poke(words, escapes, escape_bits, quotient - ESCAPE)
                escapes += escape_bits
            quotient = ESCAPE
        at += quotient
        if at >> 6 != current:
            words[current] |= gathered
            current, gathered = at >> 6, np.uint64(0)
        gathered |= ONE << np.uint64(at & 63)
        at += 1
        rest = np.uint64(number & low)
        pending |= rest << np.uint64(filled)
        filled += k
        if filled >= 64:
            words[word] |= pending
            word += 1
            filled -= 64
            pending = rest >> np.uint64(k - filled)
    if numbers.size:
        words[current] |= gathered
    if filled and word < words.size:
        words[word] |= pending


@_compile(BIT(WORDS, INT, INT, INT, INT, INT, INT, INT, INT, INT, INTS))
def read(
    words, unary, unary_bits, remainders, k, escapes, escape_bits, count, most, rising, numbers
):
    """Read what `write` wrote. Return False unless `count` numbers are escaped, none is above
    `most`, and the unary stream ends after `unary_bits`."""
    if numbers.size == 0:
        return unary_bits == 0 and count == 0
    end = unary + unary_bits
    last = (end - 1) >> 6
    index = unary >> 6
    bits = (words[index] >> np.uint64(unary & 63)) << np.uint64(unary & 63)
    previous, escaped, start = unary - 1, 0, 0
    for i in range(numbers.size):
        while bits == 0:
            index += 1
            if index > last:
                return False
            bits = words[index]
        at = (index << 6) + _zeros_below(bits)
        bits &= bits - ONE
        number = at - previous - 1
        previous = at
        if number >= ESCAPE:
            if number > ESCAPE or escaped == count:
                return False
            if escape_bits:
                number += _peek(words, escapes + escaped * escape_bits, escape_bits)
            escaped += 1
        number <<= k
        if k:
            number |= _peek(words, remainders + i * k, k)
        number += start
        if number > most:
            return False
        start = (number + 1) * rising
        numbers[i] = number
    return previous == end - 1 and escaped == count


@_compile(
    types.void(_array(types.uint16), READ_INTS, READ_INTS, INT),
    types.void(_array(types.uint32), READ_INTS, READ_INTS, INT),
)
def add(values, positions, differences, count):
    """Move the first `count` values at `positions` by their differences, in place."""
    bits = _bits(values)
    for i in range(count):
        values[positions[i]] = _moved(values[positions[i]], np.int64(differences[i]), bits)
