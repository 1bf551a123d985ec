"""Every payload gives back every bit, is as small as promised, and a wrong one never harms the
reader."""

import re
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import reduce
from pathlib import Path

import numpy as np
import pytest
import zstandard

from rose.transfer import codec
from rose.transfer.codec import apply, changes, compose, decode, encode, info
from rose.transfer.payload import PLANES, Plain

DTYPES = [np.uint16, np.uint32]


SPECIAL = "0 80000000 1 80000001 007FFFFF 00800000 7F800000 FF800000 7F800001 7FC00000 FFFFFFFF "
SPECIAL += "7FFFFFFF 3F800000 BF800000"


def weights(size: int, dtype, seed: int = 0) -> np.ndarray:
    """Patterns of Gaussian values, as trained weights are."""
    normal = np.random.default_rng(seed).standard_normal(size, dtype=np.float32)
    bits = (normal * np.float32(0.02)).view(np.uint32)
    return (bits >> 16).astype(np.uint16) if dtype == np.uint16 else bits


def trained(old: np.ndarray, fraction: float, seed: int = 0) -> np.ndarray:
    """After a step that moves this fraction, mostly by one pattern up or down: the figures of
    published RL runs."""
    draw = np.random.default_rng(seed)
    at = np.flatnonzero(draw.random(old.size) < fraction)
    new = old.copy()
    new[at] += (draw.geometric(0.87, at.size) * draw.choice([-1, 1], at.size)).astype(old.dtype)
    return new


def noise(size: int, dtype, seed: int = 0) -> np.ndarray:
    most = np.iinfo(dtype).max
    return np.random.default_rng(seed).integers(0, most, size, dtype=dtype, endpoint=True)


def change(payload: np.ndarray, width: int, values: int, most: int):
    """Decode one payload by `changes`."""
    return changes([payload], width, [values], [most], [0])[0]


def entropy(counts: np.ndarray) -> float:
    """Bits of one draw."""
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log2(shares)).sum())


def bound(new: np.ndarray, old: np.ndarray) -> float:
    """Bytes: entropy of which values changed and of the integer differences, both as independent
    draws."""
    differences = (new.astype(np.int64) - old)[new != old]
    mask = entropy(np.array([differences.size, new.size - differences.size]))
    each = entropy(np.unique(differences, return_counts=True)[1])
    return (new.size * mask + differences.size * each) / 8


def check(new: np.ndarray, old: np.ndarray) -> np.ndarray:
    """Every way from a payload to the values gives the new ones, bit for bit. Returns the
    payload."""
    payload = encode(new, old)
    values = old.copy()
    apply(payload, values)
    assert np.array_equal(values, new) and np.array_equal(decode(payload, old), new)
    assert np.array_equal(decode(payload.tobytes(), old), new)
    assert info(payload)[1:3] == (new.itemsize, new.size)
    return payload


def test_every_bfloat16_pattern_becomes_every_kind_of_other_pattern():
    every = np.arange(65536, dtype=np.uint16)
    draw = np.random.default_rng(0)
    for shift in (1, 2, 127, 128, 32767, 32768, 32769, 65535):
        check(every + np.uint16(shift), every)
    for _ in range(20):
        check(draw.permutation(every), draw.permutation(every))
    check(every ^ np.uint16(0x8000), every)
    assert np.array_equal(decode(encode(every, None)), every)


def test_nan_payloads_infinities_negative_zero_and_denormals_survive():
    """All patterns of bfloat16 are above; these are of float32."""
    special = np.array([int(word, 16) for word in SPECIAL.split()], np.uint32)
    old, new = np.repeat(special, special.size), np.tile(special, special.size)
    check(new, old)
    assert np.array_equal(decode(encode(new, None)), new)
    for one, other in zip(old, new, strict=False):
        check(np.array([other]), np.array([one]))
    sparse = np.repeat(old, 100)
    check(np.where(np.arange(sparse.size) % 100 == 7, np.repeat(new, 100), sparse), sparse)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [0, 1, 2, 3, 5, 15, 16, 17, 63, 64, 65, 127, 1000, 4099])
def test_blocks_of_any_length_and_any_share_of_changes(dtype, size):
    old = weights(size, dtype)
    for fraction in (0, 0.01, 0.3, 0.5, 0.6, 0.9, 0.99, 1):
        check(trained(old, fraction, size), old)
    for at in {0, size // 2, size - 1} if size else ():
        check(np.where(np.arange(size) == at, old ^ dtype(1), old), old)
        check(np.where(np.arange(size) == at, old, old ^ dtype(1)), old)
    check(noise(size, dtype, 1), noise(size, dtype, 2))
    assert np.array_equal(decode(encode(old, None)), old)


@pytest.mark.parametrize("dtype", DTYPES)
def test_slices_at_odd_addresses_strided_and_read_only_arrays_are_taken(dtype):
    old = weights(1001, dtype)
    new = trained(old, 0.2)
    payload = encode(new, old)
    for skip in range(9):
        raw = np.zeros(old.nbytes + 16, np.uint8)
        shifted = raw[skip : skip + old.nbytes].view(dtype)
        shifted[:] = old
        assert np.array_equal(encode(new, shifted), payload)
        moved_payload = np.concatenate([np.zeros(skip, np.uint8), payload])[skip:]
        apply(moved_payload, shifted)
        assert np.array_equal(shifted, new) and not raw[:skip].any()
        assert not raw[skip + old.nbytes :].any()
    assert np.array_equal(encode(np.repeat(new, 2)[::2], np.repeat(old, 2)[::2]), payload)
    new.flags.writeable = old.flags.writeable = payload.flags.writeable = False
    assert np.array_equal(encode(new, old), payload) and np.array_equal(decode(payload, old), new)
    with pytest.raises(ValueError, match="writable"):
        apply(payload, old)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fraction", [0.01, 0.05, 0.2, 0.5, 1])
def test_a_delta_is_within_a_tenth_of_the_entropy(dtype, fraction):
    old = weights(1 << 18, dtype)
    new = trained(old, fraction)
    payload = check(new, old)
    assert info(payload).kind == "delta" and info(payload).changed == np.count_nonzero(new != old)
    assert payload.size <= 1.06 * bound(new, old)


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_payload_is_larger_than_the_values_by_more_than_a_word(dtype):
    for size in (1, 10, 1000, 50_000):
        for old, new in [
            (noise(size, dtype, 1), noise(size, dtype, 2)),
            (weights(size, dtype), noise(size, dtype)),
            (noise(size, dtype), weights(size, dtype, 3)),
        ]:
            assert check(new, old).size <= new.nbytes + 16
            assert encode(new, None).size <= new.nbytes + 16


def test_trained_weights_without_a_base_shrink_to_two_thirds():
    for dtype, share in ((np.uint16, 0.69), (np.uint32, 0.86)):
        values = weights(1 << 18, dtype)
        payload = encode(values, None)
        assert info(payload) == ("planes", values.itemsize, values.size, None, False)
        assert payload.size < share * values.nbytes and np.array_equal(decode(payload), values)


@pytest.mark.parametrize("dtype", DTYPES)
def test_composed_payloads_do_what_applying_one_after_the_other_does(dtype):
    draw = np.random.default_rng(0)
    for trial in range(60):
        size = int(draw.integers(0, 3000))
        versions = [weights(size, dtype, trial)]
        for step in draw.integers(5, size=4):
            moved = trained(versions[-1], draw.random() ** 3, trial)
            earlier = versions[draw.integers(len(versions))].copy()
            versions.append({0: earlier, 1: noise(size, dtype, trial)}.get(step, moved))
        payloads = [encode(new, old) for old, new in zip(versions, versions[1:], strict=False)]
        if trial % 3 == 0:
            payloads[trial % 4] = encode(versions[trial % 4 + 1], None)
        left = reduce(compose, payloads)
        right = reduce(lambda later, payload: compose(payload, later), payloads[::-1])
        for made in (left, right):
            assert np.array_equal(decode(made, versions[0]), versions[-1])
            assert made.size <= versions[0].nbytes * 1.01 + 64


def test_payloads_are_of_the_smallest_kind():
    old, middle = weights(1000, np.uint16), weights(1000, np.uint16, 1)
    same = check(old.copy(), old)
    assert same.size == 8 and info(same) == ("unchanged", 2, 1000, 0, True)
    changed, new = trained(old, 0.1), trained(middle, 0.1)
    delta, full = encode(changed, old), encode(middle, None)
    assert info(compose(delta, encode(old, changed))).kind == "unchanged"
    assert np.array_equal(compose(delta, encode(changed, changed)), delta)
    assert np.array_equal(compose(delta, full), full), "it replaces everything"
    on_top = compose(full, encode(new, middle))
    assert not info(on_top).needs_base and np.array_equal(decode(on_top), new)


def test_what_does_not_fit_is_refused_by_name():
    old = weights(100, np.uint16)
    delta, full = encode(trained(old, 0.1), old), encode(old, None)
    refused = [
        (encode, (old, old[:50]), "both must be the same"),
        (encode, (old.astype(np.int64), None), "uint16 or uint32"),
        (decode, (delta,), "kind delta needs the older values"),
        (compose, (delta, encode(old[:50], None)), "not of the same block"),
    ]
    why = "100 values of uint16, but the block is"
    for values in (old[:99].copy(), old.astype(np.uint32)):
        refused += [(use, (p, values), why) for p in (delta, full) for use in (apply, decode)]
    for call, arguments, words in refused:
        with pytest.raises(ValueError, match=words):
            call(*arguments)
    assert change(full, 2, 100, 100) is None
    found = info(delta).changed
    assert change(delta, 2, 100, found) and change(delta, 2, 100, found - 1) is None
    assert change(delta, 4, 100, found) is None and change(delta, 2, 99, found) is None


def payloads_of_every_kind(dtype) -> list[tuple[np.ndarray, np.ndarray]]:
    """(payload, old values): the kinds, k of 0 and above, complement, escapes."""
    old = weights(300, dtype)
    wild = np.where(np.arange(300) % 10 == 0, noise(300, dtype), old)
    made = [
        (encode(new, old), old)
        for new in (old, trained(old, 0.05), trained(old, 0.5), trained(old, 0.9), wild)
    ]
    made += [(encode(values, None), old) for values in (np.sort(old), noise(300, dtype))]
    made.append((compose(encode(wild, old), encode(noise(300, dtype, 5), wild)), old))
    zeros, ones = np.zeros(300, dtype), np.ones(300, dtype)
    third = np.where(np.arange(300) % 3 == 0, noise(300, dtype, 5), zeros)
    made.append((compose(encode(third, zeros), encode(ones, ones)), zeros))
    assert {info(payload).kind for payload, _ in made} == {"unchanged", "delta", "planes", "raw"}
    return made


def try_payload(payload: np.ndarray, old: np.ndarray) -> bool:
    """True if it was taken; what refuses leaves the values as they were. `changes` takes the same
    payloads as `apply`, but for those that need no older values."""
    values, moves = old.copy(), change(payload, old.itemsize, old.size, old.size)
    try:
        apply(payload, values)
    except ValueError:
        assert np.array_equal(values, old) and moves is None
        return False
    decoded = decode(payload, old)
    assert np.array_equal(decoded, values)
    if not info(payload).needs_base:
        assert moves is None
        return True
    assert (np.diff(moves[0], prepend=-1, append=old.size) > 0).all()
    moved = old.copy()
    codec.move(moved, *moves, 1)
    assert np.array_equal(moved, decoded)
    return True


@pytest.mark.parametrize("dtype", DTYPES)
def test_payloads_that_are_decoded_together_are_decoded_as_each_alone(dtype):
    width = np.dtype(dtype).itemsize
    made = [payload for payload, _ in payloads_of_every_kind(dtype)]
    made[3:3] = made[1][:-8], made[1][:-1]  # cut short, by a word and within one
    shifts = [1000 * n for n in range(len(made))]
    sizes = [300] * len(made)
    together = changes(made, width, sizes, sizes, shifts)
    for payload, found, shift in zip(made, together, shifts, strict=True):
        alone = change(payload, width, 300, 300)
        assert (found is None) == (alone is None)
        if found is not None:
            assert (found[0] == alone[0] + shift).all() and (found[1] == alone[1]).all()
            assert found[1].dtype == codec.SIGNED[width]
    assert together[3] is together[4] is None
    assert sum(found is not None for found in together) >= 5
    assert changes([], width, [], [], []) == []


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_payload_with_any_bit_flipped_is_refused_or_gives_some_values(dtype):
    found = Counter()
    for payload, old in payloads_of_every_kind(dtype):
        assert try_payload(payload, old)
        for bit in [*range(256), *range(256, payload.size * 8, 1 if payload.size < 200 else 13)]:
            if bit < payload.size * 8:
                wrong = payload.copy()
                wrong[bit // 8] ^= 1 << bit % 8
                found[try_payload(wrong, old)] += 1
    assert found[True] > 100 and found[False] > 100


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_payload_cut_short_or_with_more_behind_it_is_refused_and_random_bytes_harm_nobody(dtype):
    draw, cases = np.random.default_rng(0), payloads_of_every_kind(dtype)
    for payload, old in cases:
        for size in range(0, payload.size, 1 if payload.size < 200 else 8):
            assert not try_payload(payload[:size], old)
        for more in (1, 7, 8, 16):
            assert not try_payload(np.concatenate([payload, np.zeros(more, np.uint8)]), old)
    for _ in range(2000):
        payload, old = cases[draw.integers(len(cases))]
        start = int(draw.choice([0, 4, 8, 16, 24, 32])) % payload.size
        wrong = payload.copy()
        wrong[start:] = draw.integers(0, 256, payload.size - start, dtype=np.uint8)
        if draw.random() < 0.5:
            wrong[start:] &= draw.integers(0, 256, payload.size - start, dtype=np.uint8)
        try_payload(wrong, old)


def test_threads_encode_and_decode_side_by_side():
    olds = [weights(50_000, np.uint16, i) for i in range(8)]
    news = [trained(old, 0.05, i) for i, old in enumerate(olds)]
    expected = [encode(*block) for block in zip(news, olds, strict=True)]

    def work(i: int) -> None:
        for _ in range(20):
            found = encode(news[i], olds[i])
            assert np.array_equal(found, expected[i])
            assert np.array_equal(decode(found, olds[i]), news[i])

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))


def test_the_example_of_the_format_document_is_what_the_codec_makes():
    old = np.full(24, 0x3F80, np.uint16)
    old[20] = 0x8001
    new = old.copy()
    new[[2, 5, 13, 20]] = (0x3F81, 0x3F7F, 0x3F84, 0x0000)
    document = Path(__file__).resolve().parents[2] / "docs/format.md"
    text, _, _ = document.read_text().partition("## Store")
    shown = [
        bytes.fromhex("".join(re.findall(r"^(?:[0-9a-f]{2} ?)+(?= |$)", block, re.MULTILINE)))
        for block in re.findall(r"```\n(.*?)```", text, re.DOTALL)
    ]
    assert shown == [encode(new, old).tobytes()]


@pytest.mark.parametrize("dtype", DTYPES)
def test_damaged_planes_are_refused_before_memory_is_taken(dtype):
    width = np.dtype(dtype).itemsize
    for size in (0, 4999 * width, 5001 * width, 1 << 40):
        frame = zstandard.ZstdCompressor().compress(bytes(min(size, 1 << 20)))
        if size == 1 << 40:  # a header of a frame that says so, and nothing behind it
            frame = bytes.fromhex("28b52ffdc0") + b"\x00" + size.to_bytes(8, "little")
            assert zstandard.frame_content_size(frame) == size
        head = Plain(PLANES, width, 5000, len(frame)).header
        body = frame + bytes(-len(frame) % 8)
        with pytest.raises(ValueError, match=f"{5000 * width} bytes of planes"):
            decode(np.frombuffer(head + body, np.uint8))
