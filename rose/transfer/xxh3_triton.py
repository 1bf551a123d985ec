"""Compute xxh3-128 of many blocks in a GPU's memory with Triton, without copying them to the host.

This is the long form of XXH3, for over 240 bytes (xxHash's specification, `doc/xxhash_spec.md`).
Eight lanes of 64 bits accumulate stripes of 64 bytes, and are scrambled after every 16 stripes.
Between two scrambles, stripes are only added, so their order is free, and 16 stripes are processed
at once as a tile of 16 x 8 words. One program of one warp hashes one block. The host merges the
lanes (rose/transfer/digests.py). Importing this module imports Triton, which comes with torch for
GPUs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

# Offsets in the table of `accumulate`, in words. It begins with 24 words of the secret: stripe s of
# 16 uses words s to s + 7, and the scramble the last 8 (`SCRAMBLE`). Then follow the secret of the
# last stripe (`LAST`) and the initial lanes (`FIRST`).
LAST, FIRST = tl.constexpr(24), tl.constexpr(32)
SCRAMBLE = tl.constexpr(16)
STRIPE_WORDS, STRIPES = tl.constexpr(8), tl.constexpr(16)
ROUND_WORDS = tl.constexpr(128)


@triton.jit
def _words(address, width, stride, at, mask):
    """Load a block's words number `at`. A row has `width` words; rows are `stride` bytes apart."""
    row = at // width
    where = address + row.to(tl.int64) * stride + (at - row * width).to(tl.int64) * 8
    return tl.load(where.to(tl.pointer_type(tl.uint64)), mask=mask, other=0)


@triton.jit
def _mixed(mine, others, keys):
    """Return what a lane accumulates: the product of the halves of (its word XOR the secret), plus
    the neighbouring lane's word."""
    keyed = mine ^ keys
    return others + (keyed & 0xFFFFFFFF) * (keyed >> 32)


@triton.jit
def _accumulate(blocks, table, lanes_out):
    """Write the lanes of one block, as `accumulate` returns them."""
    number = tl.program_id(0).to(tl.int64)
    address = tl.load(blocks + 4 * number)
    width = tl.load(blocks + 4 * number + 1).to(tl.int32)
    stride = tl.load(blocks + 4 * number + 2)
    words = tl.load(blocks + 4 * number + 3).to(tl.int32)
    lane, stripe = tl.arange(0, STRIPE_WORDS), tl.arange(0, STRIPES)
    at = stripe[:, None] * STRIPE_WORDS + lane[None, :]
    beside = stripe[:, None] * STRIPE_WORDS + (lane ^ 1)[None, :]
    keys = tl.load(table + stripe[:, None] + lane[None, :])
    scramble = tl.load(table + SCRAMBLE + lane)
    lanes = tl.load(table + FIRST + lane)
    rounds = (words - 1) // ROUND_WORDS
    everywhere = at >= 0
    for index in range(rounds):
        begin = index * ROUND_WORDS
        mine = _words(address, width, stride, begin + at, everywhere)
        others = _words(address, width, stride, begin + beside, everywhere)
        lanes += tl.sum(_mixed(mine, others, keys), axis=0)
        lanes = (lanes ^ (lanes >> 47) ^ scramble) * 0x9E3779B1
    begin = rounds * ROUND_WORDS
    whole = (words - 1 - begin) // STRIPE_WORDS  # remaining stripes, without the last one
    left = (stripe[:, None] < whole) & everywhere
    mine = _words(address, width, stride, begin + at, left)
    others = _words(address, width, stride, begin + beside, left)
    lanes += tl.sum(tl.where(left, _mixed(mine, others, keys), 0), axis=0)
    begin = words - STRIPE_WORDS
    mine = _words(address, width, stride, begin + lane, lane >= 0)
    others = _words(address, width, stride, begin + (lane ^ 1), lane >= 0)
    lanes += _mixed(mine, others, tl.load(table + LAST + lane))
    tl.store(lanes_out + STRIPE_WORDS * number + lane, lanes)


def accumulate(blocks: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Return the lanes (n, 8) int64 of each block, not yet merged.

    `blocks` (n, 4) int64 has four numbers for each block: its address, the number of 8-byte words
    of one of its rows, the bytes from one row to the next, and the number of its words (over 30).
    `table` is (40,) int64. Everything is in one device's memory."""
    lanes = torch.empty(len(blocks), 8, dtype=torch.int64, device=blocks.device)
    _accumulate[(len(blocks),)](
        blocks, table.view(torch.uint64), lanes.view(torch.uint64), num_warps=1
    )
    return lanes
