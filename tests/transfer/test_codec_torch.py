"""The codec in torch operations makes the CPU codec's bytes and reads them; on a GPU scripts/gpu_check.py checks it."""

import numpy as np
import pytest
import torch

from rose.transfer import codec, codec_torch

FLOATS = {np.uint16: torch.bfloat16, np.uint32: torch.float32}
SPECIAL = {np.uint16: [0, 0x8000, 1, 0x8001, 0x7F80, 0xFF80, 0x7FC1, 0xFFFF, 0x3F80],
           np.uint32: [0, 0x80000000, 1, 0x80000001, 0x7F800000, 0xFF800000, 0x7FC00001, 0xFFFFFFFF, 0x3F800000]}


def tensor(patterns: np.ndarray) -> torch.Tensor:
    signed = torch.from_numpy(patterns.view(np.int16 if patterns.itemsize == 2 else np.int32).copy())
    return signed.view(FLOATS[patterns.dtype.type])


def patterns(tensor: torch.Tensor) -> np.ndarray:
    size = tensor.element_size()
    return tensor.view(torch.int16 if size == 2 else torch.int32).numpy().view(np.uint16 if size == 2 else np.uint32)


def random_case(draw: np.random.Generator, dtype) -> tuple[np.ndarray, np.ndarray]:
    """Old and new values: noise, near ones, special values and gaps of all sizes, in blocks of 0 to 2000."""
    size = int(draw.choice([0, 1, 2, 3, 7, 8, 64, 65, draw.integers(2000)]))
    old = draw.integers(0, np.iinfo(dtype).max, size, dtype=dtype, endpoint=True)
    if draw.random() < 0.7:
        bits = draw.standard_normal(size).astype(np.float32).view(np.uint32)
        old = (bits >> 16).astype(dtype) if dtype == np.uint16 else bits
    new = old.copy()
    at = np.flatnonzero(draw.random(size) < draw.choice([0, 0.01, 0.1, 0.45, 0.55, 0.95, 1]))
    how = draw.integers(4)
    if how == 0:
        new[at] = draw.choice(np.array(SPECIAL[dtype], dtype), at.size)
    elif how == 1:
        new[at] = draw.integers(0, np.iinfo(dtype).max, at.size, dtype=dtype, endpoint=True)
    else:
        steps = draw.geometric(draw.choice([0.9, 0.3, 0.001]), at.size) * draw.choice([-1, 1], at.size)
        new[at] += steps.astype(dtype)
    return old, new


@pytest.mark.parametrize("dtype", FLOATS)
def test_both_codecs_make_the_same_bytes_and_read_each_others(dtype):
    draw = np.random.default_rng(0)
    kinds = set()
    for trial in range(400):
        old, new = random_case(draw, dtype)
        base = None if trial % 10 == 0 else old
        expected = codec.encode(new, base)
        made = codec_torch.encode(tensor(new), None if base is None else tensor(base))
        assert np.array_equal(made.numpy(), expected), (trial, codec.info(expected), codec.info(made.numpy()))
        values = tensor(old)
        codec_torch.apply(made, values)
        assert np.array_equal(patterns(values), new)
        assert np.array_equal(patterns(codec_torch.decode(made, None if base is None else tensor(old))), new)
        kinds.add(codec.info(expected).kind)
    assert kinds == {"unchanged", "delta", "dense", "raw"}


def test_every_bfloat16_pattern_is_coded_alike():
    every = np.arange(65536, dtype=np.uint16)
    new = np.random.default_rng(0).permutation(every)
    for base in (None, every):
        made = codec_torch.encode(tensor(new), None if base is None else tensor(base))
        assert np.array_equal(made.numpy(), codec.encode(new, base))
        assert np.array_equal(patterns(codec_torch.decode(made, tensor(every))), new)


@pytest.mark.parametrize("dtype", FLOATS)
def test_plain_differences_of_composed_payloads_are_read(dtype):
    draw = np.random.default_rng(0)
    zeros, ones = np.zeros(300, dtype), np.ones(300, dtype)
    noise = draw.integers(0, np.iinfo(dtype).max, 300, dtype=dtype)
    first = codec.encode(np.where(np.arange(300) % 3 == 0, noise, zeros), zeros)
    second = codec.encode(ones, ones)
    payload = codec.compose(first, second)
    expected = codec.decode(payload, zeros)
    assert np.array_equal(patterns(codec_torch.decode(torch.from_numpy(payload), tensor(zeros))), expected)


@pytest.mark.parametrize("dtype", FLOATS)
def test_what_the_cpu_codec_refuses_or_takes_this_one_does_too(dtype):
    draw = np.random.default_rng(1)
    for _ in range(15):
        old, new = random_case(draw, dtype)
        payload = codec.encode(new, old)
        for _ in range(40):
            wrong = payload.copy()
            bit = int(draw.integers(min(payload.size * 8, 400) if draw.random() < 0.5 else payload.size * 8))
            wrong[bit // 8] ^= 1 << bit % 8
            values = tensor(old)
            try:
                expected = codec.decode(wrong, old)
            except ValueError:
                with pytest.raises(ValueError):
                    codec_torch.apply(torch.from_numpy(wrong), values)
                assert np.array_equal(patterns(values), old)
            else:
                codec_torch.apply(torch.from_numpy(wrong), values)
                assert np.array_equal(patterns(values), expected)


def test_what_does_not_fit_is_refused_by_name():
    old = torch.zeros(100, dtype=torch.bfloat16)
    delta = codec_torch.encode(torch.arange(100, dtype=torch.bfloat16), old)
    with pytest.raises(ValueError, match="both must be the same"):
        codec_torch.encode(old, old[:50])
    with pytest.raises(ValueError, match="needs the older values"):
        codec_torch.decode(codec_torch.encode(old, old))
    with pytest.raises(ValueError, match="bfloat16 or float32"):
        codec_torch.encode(old.double(), None)
    with pytest.raises(ValueError, match="100 values of 2 bytes, but the block is"):
        codec_torch.apply(delta, old[:99].clone())
    assert codec_torch.decode(codec_torch.encode(old, None)).dtype == torch.bfloat16
