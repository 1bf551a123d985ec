"""The codec's loops over values and bit streams, compiled by numba.

Imported only when a block is first encoded or decoded: importing this file imports numba and
compiles every function for its one or two signatures (or loads them from numba's cache). All
release the GIL, none starts threads: callers use threads over blocks. Streams are least significant
bit first in little-endian 64-bit words; `at` is a bit offset. Readers return False for a stream
that is not what its header says, and write nothing outside their arrays. All in one file, constants
too: numba's cache notices a change only of the file that a function stands in.
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


# Of each byte of a unary stream: the zeros before each of its ones (eight bytes in a word), how
# many ones, the zeros after the last.
_ONES = [[bit for bit in range(8) if byte >> bit & 1] for byte in range(256)]
RUNS = np.array(
    [sum(b - a - 1 << 8 * i for i, (a, b) in enumerate(zip([-1, *ones], ones))) for ones in _ONES],
    np.uint64,
)
COUNTS = np.array([len(ones) for ones in _ONES], np.int64)
TAILS = np.array([7 - ones[-1] if ones else 8 for ones in _ONES], np.int64)


def _array(dtype, readonly: bool = False):
    return types.Array(dtype, 1, "C", readonly=readonly)


BIT, INT = types.boolean, types.int64
HALVES, SINGLES, BYTES, WORDS = (
    _array(t, True) for t in (types.uint16, types.uint32, types.uint8, types.uint64)
)
OUT_BYTES, OUT_WORDS, INTS, LONGS = (
    _array(t) for t in (types.uint8, types.uint64, types.int32, types.int64)
)
READ_INTS = _array(types.int32, True)


def _compile(*signatures):
    return numba.njit(list(signatures), nogil=True, cache=True)


@intrinsic
def _zeros_below(_, word):
    """Trailing zeros of a word that is not zero."""

    def generate(context, builder, signature, args):
        return builder.cttz(args[0], ir.Constant(ir.IntType(1), 1))

    return types.int64(types.uint64), generate


@intrinsic
def _load(_, array, at):
    """Eight bytes from byte `at` of an array, which need not be aligned."""

    def generate(context, builder, signature, args):
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        place = builder.gep(builder.bitcast(data, ir.IntType(8).as_pointer()), [args[1]])
        return builder.load(builder.bitcast(place, ir.IntType(64).as_pointer()), align=1)

    return types.uint64(array, types.int64), generate


@intrinsic
def _store(_, array, at, word):
    """Eight bytes to byte `at` of an array."""

    def generate(context, builder, signature, args):
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        place = builder.gep(builder.bitcast(data, ir.IntType(8).as_pointer()), [args[1]])
        builder.store(args[2], builder.bitcast(place, ir.IntType(64).as_pointer()), align=1)
        return context.get_dummy_value()

    return types.void(array, types.int64, types.uint64), generate


@intrinsic
def _bits(_, array):
    """Of one item; a constant, so that what depends on it is decided when the loop is compiled."""

    def generate(context, builder, signature, args):
        return context.get_constant(types.int64, array.dtype.bitwidth)

    return types.int64(array), generate


@numba.njit(inline="always")
def _difference(new, old, bits):
    """Steps from `old` to `new` in the order of the floats, in [-2^(bits-1), 2^(bits-1))."""
    low = np.int64((1 << (bits - 1)) - 1)
    a, b = np.int64(new), np.int64(old)
    a ^= low & -(a >> (bits - 1))
    b ^= low & -(b >> (bits - 1))
    return ((a - b) << (64 - bits)) >> (64 - bits)


@numba.njit(inline="always")
def _moved(old, difference, bits):
    """Inverse of `_difference`: the pattern `difference` steps after `old`."""
    low = np.int64((1 << (bits - 1)) - 1)
    mask = np.int64((1 << bits) - 1)
    a = np.int64(old)
    a ^= low & -(a >> (bits - 1))
    a = (a + difference) & mask
    return a ^ (low & -(a >> (bits - 1)))


@numba.njit(inline="always")
def _peek(words, at, bits):
    """`bits` in 1..57 from bit `at` on, in one load that stays within the words."""
    byte = min(at >> 3, words.size * 8 - 8)
    return np.int64(
        (_load(words, byte) >> np.uint64(at - byte * 8)) & ((ONE << np.uint64(bits)) - ONE)
    )


@numba.njit(inline="always")
def _poke(words, at, bits, value):
    """`bits` in 1..63 at bit `at`, where zeros are."""
    index, shift = at >> 6, np.uint64(at & 63)
    words[index] |= np.uint64(value) << shift
    if np.int64(shift) + bits > 64:
        words[index + 1] |= np.uint64(value) >> (np.uint64(64) - shift)


@_compile(INT(HALVES, HALVES, INTS, INTS), INT(SINGLES, SINGLES, INTS, INTS))
def scan(new, old, positions, differences):
    """Where two equally long blocks differ and by how many steps; returns the count."""
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
                changed = (
                    ((changed & ~high) + ~high) | changed
                ) & high  # the highest bit of each lane that differs
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
def gap_quotients(positions, count, first, sums):
    """sums[i] = sum of gap >> (first + i); four of them."""
    s0, s1, s2, s3 = 0, 0, 0, 0
    previous = -1
    for i in range(count):
        gap = (positions[i] - previous - 1) >> first
        previous = positions[i]
        s0 += gap
        s1 += gap >> 1
        s2 += gap >> 2
        s3 += gap >> 3
    sums[0], sums[1], sums[2], sums[3] = s0, s1, s2, s3


@_compile(types.void(READ_INTS, INT, INT, INTS))
def complement(positions, count, total, out):
    """The items of 0..total-1 that are not among the `count` ascending positions."""
    if count == total:
        return
    filled, i = 0, 0
    for start in range(0, total, 64):
        if start + 64 <= total and (i == count or positions[i] >= start + 64):
            for lane in range(64):
                out[filled + lane] = start + lane
            filled += 64
            continue
        others = ~np.uint64(0) if start + 64 <= total else (ONE << np.uint64(total - start)) - ONE
        while i < count and positions[i] < start + 64:
            others ^= ONE << np.uint64(positions[i] - start)
            i += 1
        while others:
            out[filled] = start + _zeros_below(others)
            others &= others - ONE
            filled += 1


@_compile(types.void(READ_INTS, INT, INT, OUT_WORDS, INT, INT))
def write_gaps(positions, count, k, words, unary, remainders):
    previous = -1
    at, current, gathered = unary, unary >> 6, np.uint64(0)
    low = (1 << k) - 1
    word, filled, pending = remainders >> 6, remainders & 63, np.uint64(0)
    for i in range(count):
        gap = np.int64(positions[i]) - previous - 1
        previous = np.int64(positions[i])
        at += gap >> k
        if at >> 6 != current:
            words[current] |= gathered
            current, gathered = at >> 6, np.uint64(0)
        gathered |= ONE << np.uint64(at & 63)
        at += 1
        rest = np.uint64(gap & low)
        pending |= rest << np.uint64(filled)
        filled += k
        if filled >= 64:
            words[word] |= pending
            word += 1
            filled -= 64
            pending = rest >> np.uint64(k - filled)
    if count:
        words[current] |= gathered
    if filled and word < words.size:
        words[word] |= pending


@_compile(INT(READ_INTS, INT, INTS, INTS, LONGS))
def split(differences, count, large, excess, lengths):
    """Of differences: indices of those not 1 or -1, what those are above 2 in magnitude, how many
    of these are how many bits long; returns how many. `large` and `excess` hold one item more than
    `count`."""
    found = 0
    for i in range(count):
        magnitude = abs(np.int64(differences[i]))
        large[found] = i
        excess[found] = magnitude - 2
        found += np.int64(magnitude > 1)
    for j in range(found):
        value, length = excess[j], 0
        while value:
            value >>= 1
            length += 1
        lengths[length] += 1
    return found


@_compile(types.void(READ_INTS, INT, INT, LONGS))
def excess_sizes(excess, count, k, sizes):
    """Sum of quotients, each at most `ESCAPE`; escapes; largest quotient."""
    unary, escapes, largest = 0, 0, 0
    for i in range(count):
        quotient = excess[i] >> k
        unary += min(quotient, ESCAPE)
        escapes += np.int64(quotient >= ESCAPE)
        largest = max(largest, quotient)
    sizes[0], sizes[1], sizes[2] = unary, escapes, largest


@_compile(types.void(READ_INTS, INT, INT, INT, OUT_WORDS, INT, INT, INT))
def write_excess(excess, count, k, escape_bits, words, unary, remainders, escapes):
    low = (1 << k) - 1
    at = unary
    for i in range(count):
        quotient = np.int64(excess[i]) >> k
        if quotient >= ESCAPE:
            if escape_bits:
                _poke(words, escapes, escape_bits, quotient - ESCAPE)
                escapes += escape_bits
            quotient = ESCAPE
        at += quotient
        words[at >> 6] |= ONE << np.uint64(at & 63)
        at += 1
        if k:
            _poke(words, remainders + i * k, k, excess[i] & low)


@_compile(types.void(READ_INTS, INT, OUT_WORDS, INT))
def write_signs(differences, count, words, at):
    """A bit each, one for negative."""
    current, gathered = at >> 6, np.uint64(0)
    for i in range(at, at + count):
        if i >> 6 != current:
            words[current] |= gathered
            current, gathered = i >> 6, np.uint64(0)
        gathered |= np.uint64(differences[i - at] < 0) << np.uint64(i & 63)
    if count:
        words[current] |= gathered


@_compile(types.void(READ_INTS, INT, INT, OUT_WORDS, INT))
def write_plain(differences, count, bits, words, at):
    """Two's complement, `bits` each."""
    low = np.int64((1 << bits) - 1)
    for i in range(count):
        _poke(words, at + i * bits, bits, np.int64(differences[i]) & low)


@_compile(BIT(WORDS, INT, INT, INT, INT, INT, INT, INTS))
def read_gaps(words, unary, unary_bits, remainders, k, count, total, positions):
    """`count` ascending positions below `total`."""
    if count == 0:
        return True
    end = unary + unary_bits
    last = (end - 1) >> 6
    index = unary >> 6
    bits = (words[index] >> np.uint64(unary & 63)) << np.uint64(unary & 63)
    previous, position = unary - 1, -1
    for i in range(count):
        while bits == 0:
            index += 1
            if index > last:
                return False
            bits = words[index]
        at = (index << 6) + _zeros_below(bits)
        bits &= bits - ONE
        gap = (at - previous - 1) << k
        previous = at
        if k:
            gap |= _peek(words, remainders + i * k, k)
        position += gap + 1
        if position >= total:
            return False
        positions[i] = position
    return previous == end - 1


@_compile(types.void(WORDS, INT, INT, INTS))
def read_signs(words, at, count, differences):
    """1 or -1 each."""
    for i in range(count):
        bit = at + i
        differences[i] = 1 - 2 * np.int64((words[bit >> 6] >> np.uint64(bit & 63)) & ONE)


@_compile(types.void(WORDS, INT, INT, INT, INTS))
def read_plain(words, at, count, bits, differences):
    for i in range(count):
        differences[i] = (_peek(words, at + i * bits, bits) << (64 - bits)) >> (64 - bits)


@_compile(BIT(WORDS, INT, INT, INT, INT, INT, INT, INT, INT, READ_INTS, INT, INTS))
def read_excess(
    words,
    unary,
    unary_bits,
    remainders,
    k,
    escapes,
    escape_bits,
    escape_count,
    bits_each,
    large,
    count,
    differences,
):
    """Makes `large[i]`'s difference, 1 or -1, its sign times the i-th magnitude, at most
    2^(bits_each - 1)."""
    if count == 0:
        return True
    end = unary + unary_bits
    last = (end - 1) >> 6
    index = unary >> 6
    bits = (words[index] >> np.uint64(unary & 63)) << np.uint64(unary & 63)
    previous, escaped = unary - 1, 0
    for i in range(count):
        while bits == 0:
            index += 1
            if index > last:
                return False
            bits = words[index]
        at = (index << 6) + _zeros_below(bits)
        bits &= bits - ONE
        value = at - previous - 1
        previous = at
        if value > ESCAPE:
            return False
        if value == ESCAPE:
            if escaped == escape_count:
                return False
            if escape_bits:
                value += _peek(words, escapes + escaped * escape_bits, escape_bits)
            escaped += 1
        value <<= k
        if k:
            value |= _peek(words, remainders + i * k, k)
        if value + 2 > 1 << (bits_each - 1):
            return False
        difference = differences[large[i]] * (value + 2)
        differences[large[i]] = (difference << (64 - bits_each)) >> (64 - bits_each)
    return previous == end - 1 and escaped == escape_count


@_compile(
    types.void(_array(types.uint16), READ_INTS, READ_INTS, INT),
    types.void(_array(types.uint32), READ_INTS, READ_INTS, INT),
)
def add(values, positions, differences, count):
    """In place: the value at each position moves by its difference."""
    bits = _bits(values)
    for i in range(count):
        values[positions[i]] = _moved(values[positions[i]], np.int64(differences[i]), bits)


@_compile(INT(READ_INTS, READ_INTS, READ_INTS, READ_INTS, INT, INTS, INTS))
def merge(first, first_differences, second, second_differences, bits, positions, differences):
    """Sums, modulo 2^bits, of two sorted lists of changes; what sums to zero vanishes. Returns the
    count."""
    i, j, count = 0, 0, 0
    while i < first.size or j < second.size:
        take_first = j == second.size or (i < first.size and first[i] <= second[j])
        take_second = i == first.size or (j < second.size and second[j] <= first[i])
        difference = 0
        position = 0
        if take_first:
            position = np.int64(first[i])
            difference += np.int64(first_differences[i])
            i += 1
        if take_second:
            position = np.int64(second[j])
            difference += np.int64(second_differences[j])
            j += 1
        difference = (difference << (64 - bits)) >> (64 - bits)
        if difference:
            positions[count], differences[count] = position, difference
            count += 1
    return count


@_compile(types.void(HALVES, LONGS), types.void(SINGLES, LONGS))
def exponent_counts(values, counts):
    """Adds to counts (1024,): four counters an exponent, so that equal neighbours need not wait for
    each other."""
    shift = 7 if _bits(values) == 16 else 23
    whole = values.size - values.size % 4
    for i in range(0, whole, 4):
        for lane in range(4):
            counts[(((np.int64(values[i + lane]) >> shift) & 255) << 2) + lane] += 1
    for i in range(whole, values.size):
        counts[((np.int64(values[i]) >> shift) & 255) << 2] += 1


@_compile(
    types.void(HALVES, BYTES, INT, OUT_BYTES, INT, INT, OUT_WORDS, INT, INT),
    types.void(SINGLES, BYTES, INT, OUT_BYTES, INT, INT, OUT_WORDS, INT, INT),
)
def write_dense(values, ranks, k, out, halves, planes, words, unary, remainders):
    """`out` and `words` are the same memory; `halves` and `planes` are byte offsets, the streams'
    are of bits."""
    wide = _bits(values) == 32
    at, current, gathered = unary, unary >> 6, np.uint64(0)
    low = (1 << k) - 1
    word, filled, pending = remainders >> 6, remainders & 63, np.uint64(0)
    top = _bits(values) - 16
    if wide:
        for i in range(values.size):
            out[halves + 2 * i] = values[i] & 255
            out[halves + 2 * i + 1] = (values[i] >> 8) & 255
    for i in range(values.size):
        value = values[i] >> top
        out[planes + i] = ((value >> 8) & 128) | (value & 127)
    for i in range(values.size):
        rank = np.int64(ranks[(np.int64(values[i]) >> (top + 7)) & 255])
        at += rank >> k
        if at >> 6 != current:
            words[current] |= gathered
            current, gathered = at >> 6, np.uint64(0)
        gathered |= ONE << np.uint64(at & 63)
        at += 1
        rest = np.uint64(rank & low)
        pending |= rest << np.uint64(filled)
        filled += k
        if filled >= 64:
            words[word] |= pending
            word += 1
            filled -= 64
            pending = rest >> np.uint64(k - filled)
    if values.size:
        words[current] |= gathered
    if filled and word < words.size:
        words[word] |= pending


@_compile(BIT(BYTES, INT, INT, OUT_BYTES))
def read_quotients(data, start, bits, quotients):
    """The lengths of the runs of zeros in a unary stream of `bits` bits from byte `start` on, a
    byte of the stream at a time. `quotients` holds 8 bytes more than there are ones: eight are
    written at a time."""
    found, run = 0, 0
    limit = quotients.size - 8
    for at in range((bits + 7) >> 3):
        byte = np.int64(data[start + at])
        if at == bits >> 3:
            byte &= (1 << (bits & 7)) - 1
        if byte == 0:
            run += 8
            continue
        if found >= limit or run + np.int64(RUNS[byte] & np.uint64(255)) > 255:
            return False
        _store(quotients, found, RUNS[byte] + np.uint64(run))
        found += COUNTS[byte]
        run = TAILS[byte]
    return found == limit and (limit == 0 or (run + bits) & 7 == 0 and run < 8)


@_compile(BIT(BYTES, WORDS, INT, INT, OUT_BYTES))
def append_remainders(data, words, at, k, quotients):
    """Makes the quotients ranks, in place: k bits each from bit `at` on, of which eight fit in one
    load. `data` and `words` are the same memory."""
    count = quotients.size - 8
    most, low = 255 >> k, np.uint64((1 << k) - 1)
    largest = 0
    i = 0
    while i + 8 <= count and ((at + i * k) >> 3) + 8 <= data.size:
        # 8 values later: whole bytes later
        bits = _load(data, (at + i * k) >> 3) >> np.uint64(at & 7)
        for j in range(8):
            largest = max(largest, np.int64(quotients[i + j]))
            quotients[i + j] = (np.uint64(quotients[i + j]) << np.uint64(k)) | (bits & low)
            bits >>= np.uint64(k)
        i += 8
    for j in range(i, count):
        largest = max(largest, np.int64(quotients[j]))
        quotients[j] = (np.int64(quotients[j]) << k) | _peek(words, at + j * k, k)
    return largest <= most


@_compile(
    BIT(BYTES, INT, INT, BYTES, BYTES, _array(types.uint16)),
    BIT(BYTES, INT, INT, BYTES, BYTES, _array(types.uint32)),
)
def read_dense(data, halves, planes, ranks, exponents, values):
    """Inverse of `write_dense`; `exponents` in order of rank."""
    wide = _bits(values) == 32
    largest = 0
    for i in range(values.size):
        largest = max(largest, np.int64(ranks[i]))
    if largest >= exponents.size:
        return values.size == 0
    for i in range(values.size):
        plane = np.int64(data[planes + i])
        value = ((plane & 128) << 8) | (np.int64(exponents[ranks[i]]) << 7) | (plane & 127)
        if wide:
            value = (
                (value << 16)
                | (np.int64(data[halves + 2 * i + 1]) << 8)
                | np.int64(data[halves + 2 * i])
            )
        values[i] = value
    return True
