"""Attention over a prefix tree: on a CPU by stretches (rose/trainer/stretches.py), on a GPU flex
attention where it works, else SDPA, dense mask.

Flex attention leaves out the blocks of 128 x 128 in which no token attends to another, so a tree
costs about what its rows cost a causal kernel, less what they share, and nothing of the size L x L
is ever there. It is compiled (Triton) and trains on GPUs only. Blocks are found from the tree
itself: torch's `create_block_mask` would make the dense mask first.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from rose.trainer import stretches
from rose.trainer.prefix_tree import PrefixTree, build_from_rows

NAME = "rose_tree"  # in transformers' registry of attention functions
BLOCK = 128  # tokens; of the kernel's, too
# tokens of a tree, with padding: one of a single block would be compiled apart
SMALLEST = 2 * BLOCK
# of a tree under a dense mask: 64 MiB of bool, and up to 256 MiB of bias in each layer's call
DENSE_TOKENS = 8192
OFF = ("TORCH_COMPILE_DISABLE", "TORCHDYNAMO_DISABLE")  # torch's variables
CLOSE = 0.02  # relative to the largest value: bfloat16 has 8 bits
# shared and own tokens of the trees that are tried at start
PROBE_ROWS = ((200, 150), (200, 90), (200, 33), (0, 140))


def attended(
    tree: PrefixTree, flex: bool, parts: int = 1, by_stretches: bool = False
) -> tuple[PrefixTree, Tensor | BlockMask]:
    """The tree as it is computed, by so many ranks, and what its tokens attend to, as `attention`
    takes it."""
    if by_stretches:
        return tree, stretches.find(tree.ends)
    if not flex:
        tree = padded(tree, parts, parts)
        return tree, tree.attention()
    tree = padded(tree, math.lcm(BLOCK, parts))
    return tree, block_mask(tree.ends)


def padded(tree: PrefixTree, multiple: int = BLOCK, smallest: int = SMALLEST) -> PrefixTree:
    """The tree with tokens behind it that attend to themselves only, up to a multiple of tokens."""
    length = len(tree.tokens)
    more = -(-max(smallest, length) // multiple) * multiple - length
    if not more:
        return tree
    alone = torch.arange(length + 1, length + more + 1, device=tree.ends.device)
    grown = (nn.functional.pad(x, (0, more)) for x in (tree.tokens, tree.depths))
    return PrefixTree(*grown, torch.cat([tree.ends, alone]), tree.nodes)


def block_mask(ends: Tensor) -> BlockMask:
    """(L,) int64 of a `padded` tree, on any device -> which blocks of keys each block of queries
    attends to, and which of them whole. A token attends to those at or before it whose end is
    behind it."""
    blocks = ends.view(-1, BLOCK)
    count = len(blocks)
    at = torch.arange(count, device=ends.device)
    before = at < at[:, None]  # [queries, keys]
    begin = (at * BLOCK)[:, None]
    full = before & (blocks.amin(1) >= begin + BLOCK)
    some = before & (blocks.amax(1) > begin) | (at == at[:, None])

    def attends(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (query < ends[key])

    return BlockMask.from_kv_blocks(
        *_listed(some & ~full),
        *_listed(full),
        BLOCK_SIZE=BLOCK,
        mask_mod=attends,
        seq_lengths=(len(ends), len(ends)),
    )


def _listed(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """[queries, keys] bool -> how many in each row, and their places first; int32."""
    places = chosen.int().argsort(dim=1, descending=True, stable=True)
    return chosen.sum(1, dtype=torch.int32)[None, None], places.int()[None, None]


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention as transformers calls it: query (B, heads, L, d), key and value (B, kv_heads, L, d)
    -> (B, L, heads, d)."""
    by_stretches = isinstance(attention_mask, Tensor) and attention_mask.dtype == torch.int64
    if by_stretches or isinstance(attention_mask, BlockMask):
        return _over_tree(query, key, value, attention_mask, scaling), None
    return sdpa_attention_forward(
        module, query, key, value, attention_mask, scaling=scaling, **kwargs
    )


@torch.compiler.disable  # a layer's code (trainer.compile) would be that of one tree
def _over_tree(
    query: Tensor, key: Tensor, value: Tensor, attended: Tensor | BlockMask, scaling: float | None
) -> Tensor:
    """As `attention`."""
    if isinstance(attended, Tensor):
        out = stretches.attention(query, key, value, attended, scaling)
        return out.transpose(1, 2).contiguous()
    # Elsewhere it is not compiled: right, but as large and slow as a dense mask.
    flex = _compiled() if query.device.type == "cuda" else flex_attention
    return flex(query, key, value, block_mask=attended, scale=scaling, enable_gqa=True).transpose(
        1, 2
    )


@functools.cache
def _compiled() -> Callable[..., Tensor]:
    # fullgraph: more shapes than torch compiles for are an error; else it would go on uncompiled, L
    # x L in float32
    return torch.compile(flex_attention, fullgraph=True)


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, sdpa_mask)


def why_not_flex(
    device: torch.device, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype
) -> str:
    """Why flex attention can't train this shape on this device; "" if it can. It is tried."""
    if device.type != "cuda":
        return "flex attention trains on GPUs only"
    for variable in OFF:
        if os.environ.get(variable) == "1":  # it would run, L x L in float32
            return f"{variable}=1 is set here, so torch compiles no flex attention"
    form = (heads, kv_heads, head_dim, dtype)
    try:  # a second length: torch compiles once more, for all that come
        found = max(difference(device, *form, times) for times in (1, 3, 2))
    except Exception as error:  # of the compilers of torch, Triton and C, which have no common base
        first = str(error).strip().partition("\n")[0]
        return f"flex attention fails: {type(error).__name__}: {first}"
    if not found <= CLOSE:
        return f"flex attention is off by {found:.2g} of the largest value, more than {CLOSE:g}"
    return ""


def difference(
    device: torch.device,
    heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    times: int = 1,
) -> float:
    """The largest of values and gradients between `attention` and float32 under the dense mask,
    relative to the largest value or gradient, over a tree of random numbers, `times` PROBE_ROWS.
    The generator of random numbers is left as it was."""
    tree = padded(build_from_rows(*(times * np.array(PROBE_ROWS)).T).to(device))
    numbers = torch.Generator(device).manual_seed(0)
    shapes = [(1, count, len(tree.tokens), head_dim) for count in (heads, kv_heads, kv_heads)]
    inputs = [torch.randn(shape, generator=numbers, device=device).to(dtype) for shape in shapes]
    weights = torch.randn(shapes[0], generator=numbers, device=device).transpose(1, 2)
    ours = _with_gradients(
        lambda q, k, v: attention(nn.Module(), q, k, v, block_mask(tree.ends))[0], inputs, weights
    )
    dense = tree.attention()

    def reference(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        key, value = (repeat_kv(x, heads // kv_heads) for x in (key, value))
        return nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=dense
        ).transpose(1, 2)

    exact = _with_gradients(reference, [x.float() for x in inputs], weights)
    pairs = zip(ours, exact, strict=True)
    return max(float((a.float() - b).abs().max() / b.abs().max()) for a, b in pairs)


def _with_gradients(
    function: Callable[..., Tensor], inputs: list[Tensor], weights: Tensor
) -> list[Tensor]:
    """Values, and the gradient of each input; on a device that trains."""
    leaves = [x.clone().requires_grad_(x.device.type == "cuda") for x in inputs]
    values = function(*leaves)
    if not values.requires_grad:
        return [values]
    (values.float() * weights).sum().backward()
    return [values.detach(), *(leaf.grad for leaf in leaves)]
