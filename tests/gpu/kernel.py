"""The smallest Triton kernel, by which gpu_check.py shows that Triton can compile here."""

import triton
import triton.language as tl


@triton.jit
def add_one(values, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(values + at, tl.load(values + at, mask=at < count) + 1, mask=at < count)
