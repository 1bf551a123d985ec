"""xxh3-128 of many blocks in a GPU's memory at once, in Triton, so that nothing is read back.

The long form of XXH3 (over 240 bytes; xxHash's specification, `doc/xxhash_spec.md`): eight lanes of
64 bits take in stripes of 64 bytes; after 16 stripes the lanes are scrambled. The stripes between
two scrambles only add, so that one program of one warp takes them as a tile of 16 x 8 words, and
the blocks of a version are each a program. The lanes are brought together on the host
(rose/transfer/digests.py). Importing this module imports Triton, which comes with torch for GPUs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

# Of the table that `accumulate` is given: 24 words of the secret, of which stripe s of 16 takes
# words s to s + 7 and the scrambling the last 8; the secret of the last stripe; the lanes at first.
LAST, FIRST = tl.constexpr(24), tl.constexpr(32)
SCRAMBLE = tl.constexpr(16)
STRIPE_WORDS, STRIPES = tl.constexpr(8), tl.constexpr(16)
ROUND_WORDS = tl.constexpr(128)


@triton.jit
def _words(address, width, stride, at, mask):
    """Words number `at` of the block: `width` of them are a row, and rows are `stride` bytes
    apart."""
    row = at // width
    where = address + row.to(tl.int64) * stride + (at - row * width).to(tl.int64) * 8
    return tl.load(where.to(tl.pointer_type(tl.uint64)), mask=mask, other=0)


@triton.jit
def _mixed(mine, others, keys):
    """What a word adds to its lane: the product of its halves, once the secret is on it, and the
    neighbouring lane's word."""
    keyed = mine ^ keys
    return others + (keyed & 0xFFFFFFFF) * (keyed >> 32)


@triton.jit
def _accumulate(blocks, table, lanes_out):
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
    for turn in range(rounds):
        begin = turn * ROUND_WORDS
        mine = _words(address, width, stride, begin + at, everywhere)
        others = _words(address, width, stride, begin + beside, everywhere)
        lanes += tl.sum(_mixed(mine, others, keys), axis=0)
        lanes = (lanes ^ (lanes >> 47) ^ scramble) * 0x9E3779B1
    begin = rounds * ROUND_WORDS
    whole = (words - 1 - begin) // STRIPE_WORDS  # stripes that are left, but for the last one
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
    """(n, 8) int64: the lanes of each block, not yet brought together.

    `blocks` (n, 4) int64: address, words of 8 bytes in a row, bytes from row to row, words in all
    (over 30); `table` (40,) int64. All in one device's memory, the blocks too.
    """
    lanes = torch.empty(len(blocks), 8, dtype=torch.int64, device=blocks.device)
    _accumulate[(len(blocks),)](
        blocks, table.view(torch.uint64), lanes.view(torch.uint64), num_warps=1
    )
    return lanes
