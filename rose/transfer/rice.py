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
MAGIC, VERSION, DELTA = 0x52, 2, 1
assert (ESCAPE, MAGIC, VERSION, DELTA) == (
    payload.ESCAPE,
    payload.MAGIC,
    payload.VERSION,
    payload.DELTA,
)
ONE = np.uint64(1)
# Most numbers of a stream from which its Rice parameter is guessed, before exact sizes decide.
SAMPLE = 4096
AHEAD = 64  # values moved together; their cache lines all stay in the nearest cache


def _array(dtype, readonly: bool = False):
    return types.Array(dtype, 1, "C", readonly=readonly)


BIT, INT = types.boolean, types.int64
HALVES, SINGLES, WORDS = (_array(t, True) for t in (types.uint16, types.uint32, types.uint64))
OUT_WORDS, INTS, LONGS = (_array(t) for t in (types.uint64, types.int32, types.int64))
READ_INTS, READ_LONGS = _array(types.int32, True), _array(types.int64, True)
SHORTS = _array(types.int16, True)
OUT_SHORTS, LAYOUTS = _array(types.int16), types.Array(types.int64, 2, "C")


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
    """Return an item's bit width as a constant, so that compilation resolves branches on it."""

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
    count of escapes, and the largest quotient. If `rising` is 1, the numbers ascend, and the gaps
    between neighbours are coded; if it is 0, the numbers themselves are."""
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
    """Write Rice coded numbers at their three streams' bit offsets, where all bits must be zero."""
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
    """Read what `write` wrote. Return False unless `count` numbers are escaped, no number is above
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


@numba.njit(inline="always")
def _length(number):
    """Return the bits of a number that is not negative, without leading zeros."""
    bits = 0
    while number >> bits:
        bits += 1
    return bits


@numba.njit(inline="always")
def _likely_k(numbers, rising):
    """Return the best number of remainder bits for a sample of the numbers.

    A number of i bits is taken as 1.5 * 2^(i-1). The mean is no good estimate, because a few
    values that cross zero differ by thousands and would dominate it."""
    lengths, longest = np.zeros(33, np.int64), 0
    for i in range(0, numbers.size, max(1, numbers.size // SAMPLE)):
        before = np.int64(numbers[i - 1]) + 1 if i else 0
        length = _length(np.int64(numbers[i]) - rising * before)
        lengths[length] += 1
        longest = max(longest, length)
    best, least = 0, np.int64(-1)
    for k in range(longest + 1):
        escape_bits, total = max(0, longest - k - 3), 0
        for length in range(longest + 1):
            quotient = (np.int64(3) << length >> 2) >> k
            quotient = quotient if quotient < ESCAPE else ESCAPE + escape_bits
            total += lengths[length] * (1 + k + quotient)
        if least < 0 or total < least:
            best, least = k, total
    return best


@numba.njit(inline="always")
def _choose(numbers, rising, fields):
    """Write a stream's `fields` (k, unary bits, escapes, bits of an escape). Of the likely k and
    its neighbours, takes the one with the fewest bits."""
    likely, sizes, least = _likely_k(numbers, rising), np.zeros(3, np.int64), np.int64(-1)
    for k in range(max(0, likely - 1), likely + 2):
        measure(numbers, rising, k, sizes)
        unary, escapes = numbers.size + sizes[0], sizes[1]
        escape_bits = _length(sizes[2] - ESCAPE) if escapes else 0
        total = unary + numbers.size * k + escapes * escape_bits
        if least < 0 or total < least:
            least = total
            fields[0], fields[1], fields[2], fields[3] = k, unary, escapes, escape_bits


@numba.njit(inline="always")
def _others(total, chosen, others):
    """Write the items of 0..total-1 that are not in `chosen`, which ascends."""
    at, count = 0, 0
    for i in range(total):
        if at < chosen.size and chosen[at] == i:
            at += 1
        else:
            others[count] = i
            count += 1


@numba.njit(inline="always")
def _fewer(total, chosen):
    """Return the chosen items, or the items that are not chosen if those are fewer."""
    if 2 * chosen.size <= total:
        return chosen
    others = np.empty(total - chosen.size, np.int32)
    _others(total, chosen, others)
    return others


@_compile(OUT_WORDS(READ_INTS, READ_INTS, INT, INT))
def encode_delta(positions, differences, total, width):
    """Return the words of a delta's payload, for `total` values of `width` bytes. At the ascending
    positions (c,), values change by the differences (c,), none of them 0. c is not 0."""
    changed, count = positions.size, 0
    at_large, excess = np.empty(changed, np.int32), np.empty(changed, np.int32)
    for i in range(changed):
        size = abs(np.int64(differences[i]))
        if size > 1:
            at_large[count], excess[count] = i, size - 2
            count += 1
    first = _fewer(total, positions + np.int32(0))  # numba needs one type of both results
    second, third = _fewer(changed, at_large[:count]), excess[:count]
    fields = np.empty((3, 4), np.int64)
    _choose(first, 1, fields[0])
    _choose(second, 1, fields[1])
    _choose(third, 0, fields[2])
    header, end = np.zeros(64, np.uint8), 4
    header[0], header[1], header[2], header[3] = MAGIC, VERSION, DELTA, width
    for i in range(15):
        field = total if i == 0 else changed if i == 1 else count if i == 2 else 0
        if i > 2:
            field = fields[(i - 3) // 4, (i - 3) % 4]
        while field > 127:
            header[end] = field & 127 | 128
            field >>= 7
            end += 1
        header[end] = field
        end += 1
    sizes = first.size, second.size, third.size
    signs = 64 * ((end + 7) // 8)
    bits = signs + changed
    for i in range(3):
        bits += fields[i, 1] + sizes[i] * fields[i, 0] + fields[i, 2] * fields[i, 3]
    words = np.zeros((bits + 63) // 64, np.uint64)
    for i in range(end):
        words[i >> 3] |= np.uint64(header[i]) << np.uint64(8 * (i & 7))
    for i in range(changed):
        at = signs + i
        words[at >> 6] |= np.uint64(differences[i] < 0) << np.uint64(at & 63)
    at = signs + changed
    for i in range(3):
        numbers = first if i == 0 else second if i == 1 else third
        k, unary, escapes, escape_bits = fields[i]
        after = at + unary, at + unary + numbers.size * k
        write(numbers, np.int64(i < 2), k, escape_bits, words, at, *after)
        at = after[1] + escapes * escape_bits
    return words


@_compile(INT(WORDS, READ_LONGS, INTS, INTS))
def decode_delta(words, layout, positions, differences):
    """Write the positions (c,) and differences (c,) of a delta's payload. `layout` (29,) is the
    values' count and bits, c, how many differences are large, and the offset of the signs. Then
    follow, for each of the three streams, its count, k, unary bits, escapes, bits of an escape, and
    its three offsets. Return 0, or 1 plus the number of a stream that contradicts the layout."""
    values, bits, changed, large, signs = layout[:5]
    at_large, excess = np.empty(large, np.int32), np.empty(large, np.int32)
    for i in range(3):
        count, k, unary_bits, escapes, escape_bits, unary, remainders, at = layout[
            5 + 8 * i : 13 + 8 * i
        ]
        numbers = positions if i == 0 else at_large if i == 1 else excess
        total = values if i == 0 else changed
        most = total - 1 if i < 2 else (np.int64(1) << (bits - 1)) - 2
        read_in = numbers if count == numbers.size else np.empty(count, np.int32)
        if not read(
            *(words, unary, unary_bits, remainders, k, at, escape_bits, escapes, most),
            np.int64(i < 2),
            read_in,
        ):
            return i + 1
        if count < numbers.size:
            _others(total, read_in, numbers)
    for i in range(changed):
        at = signs + i
        negative = np.int64(words[at >> 6] >> np.uint64(at & 63) & ONE)
        differences[i] = 1 - 2 * negative
    for i in range(large):
        differences[at_large[i]] *= excess[i] + 2
    return 0


@_compile(
    types.void(WORDS, LAYOUTS, READ_LONGS, READ_LONGS, INTS, OUT_SHORTS),
    types.void(WORDS, LAYOUTS, READ_LONGS, READ_LONGS, INTS, INTS),
)
def decode_deltas(words, layouts, shifts, ends, positions, differences):
    """Decode a delta for each row i of `layouts`, by `decode_delta`, to the items of `positions`
    and `differences` before ends[i]. Adds shifts[i] to its positions. If a delta contradicts its
    layout, its row begins with -1 afterwards."""
    begin = 0
    for i in range(ends.size):
        end = ends[i]
        found = np.empty(end - begin, np.int32)
        if decode_delta(words, layouts[i], positions[begin:end], found):
            layouts[i, 0] = -1
        for j in range(found.size):
            positions[begin + j] += np.int32(shifts[i])
            differences[begin + j] = found[j]
        begin = end


@_compile(
    types.void(_array(types.uint16), READ_INTS, READ_INTS, INT),
    types.void(_array(types.uint16), READ_INTS, SHORTS, INT),
    types.void(_array(types.uint16), READ_LONGS, SHORTS, INT),
    types.void(_array(types.uint32), READ_INTS, READ_INTS, INT),
    types.void(_array(types.uint32), READ_LONGS, READ_INTS, INT),
)
def add(values, positions, differences, sign):
    """Move the values at `positions` by their differences times `sign`, 1 or -1, in place. Values
    are loaded `AHEAD` at a time, since the processor waits for each store before a later load."""
    bits = _bits(values)
    held = np.empty(AHEAD, np.int64)
    for start in range(0, positions.size, AHEAD):
        count = min(AHEAD, positions.size - start)
        for i in range(count):
            held[i] = values[np.uint64(positions[start + i])]
        for i in range(count):
            by = sign * np.int64(differences[start + i])
            values[np.uint64(positions[start + i])] = _moved(held[i], by, bits)
