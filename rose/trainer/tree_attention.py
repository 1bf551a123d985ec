"""Attention over a prefix tree: on a CPU by stretches (rose/trainer/stretches.py), on a GPU by flex
attention where it works, else by SDPA with a dense mask.

Flex attention skips blocks of 128 x 128 in which no token attends to another. So a tree costs about
as much as its rows in a causal kernel, minus the shared part. No tensor of the size L x L exists.
Flex attention is compiled (Triton) and trains on GPUs only. Blocks are found from the tree itself,
because torch's `create_block_mask` would make the dense mask first.
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
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from rose.trainer import stretches
from rose.trainer.prefix_tree import PrefixTree, build_from_rows

NAME = "rose_tree"  # our name in transformers' registry of attention functions
BLOCK = 128  # tokens of a block; the kernel's own size
# Fewest tokens of a tree, with padding: torch would compile separately for a single block.
SMALLEST = 2 * BLOCK
# Most tokens of a tree under a dense mask: 64 MiB of bool, and up to 256 MiB of bias in a layer.
DENSE_TOKENS = 8192
# LONG: fewest tokens of a row for cuDNN's attention; their number is rounded up to a MULTIPLE. On
# an H200 its kernels do 1.8 times the operations a second of torch's, but need 0.1 s for the first
# row of each new length. Shorter rows would lose more to padding than they gain.
LONG, MULTIPLE = 2048, 128
HOPPER = 9  # lowest compute capability on which cuDNN's attention is used
OFF = ("TORCH_COMPILE_DISABLE", "TORCHDYNAMO_DISABLE")  # torch's switches against compilation
CLOSE = 0.02  # largest error relative to the largest value: bfloat16 has 8 bits of precision
# (shared, own) tokens of the rows of the tree that is tried at the start
PROBE_ROWS = ((200, 150), (200, 90), (200, 33), (0, 140))
# SDPA's kernels, by preference: the first one that supports the inputs is used.
IN_ORDER = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]


def attended(
    tree: PrefixTree, flex: bool, parts: int = 1, by_stretches: bool = False
) -> tuple[PrefixTree, Tensor | BlockMask]:
    """Return the tree, padded as computation by `parts` ranks needs it, and the mask, block mask or
    stretches that `attention` takes."""
    if by_stretches:
        return tree, stretches.find(tree.ends)
    if not flex:
        tree = padded(tree, parts, parts)
        return tree, tree.attention()
    tree = padded(tree, math.lcm(BLOCK, parts))
    return tree, block_mask(tree.ends)


def padded(tree: PrefixTree, multiple: int = BLOCK, smallest: int = SMALLEST) -> PrefixTree:
    """Pad the tree to a `multiple` of tokens and to `smallest`. Padding attends only to itself."""
    length = len(tree.tokens)
    more = -(-max(smallest, length) // multiple) * multiple - length
    if not more:
        return tree
    alone = torch.arange(length + 1, length + more + 1, device=tree.ends.device)
    grown = (nn.functional.pad(x, (0, more)) for x in (tree.tokens, tree.depths))
    return PrefixTree(*grown, torch.cat([tree.ends, alone]), tree.nodes)


def block_mask(ends: Tensor) -> BlockMask:
    """Return which blocks of keys each block of queries attends to, partly or whole. `ends` are
    those of a `padded` tree, (L,) int64, on any device. A token attends to itself and to each
    earlier token whose end is behind it."""
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
    """Return each row's number of True, and its column indices with those of True first, int32."""
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
    """Compute attention, with transformers' signature: query (B, heads, L, d), key and value (B,
    kv_heads, L, d). Returns (B, L, heads, d)."""
    if _kernels and attention_mask is None and query.shape[2] >= LONG:
        with sdpa_kernel(_kernels, set_priority=True):
            return sdpa_attention_forward(
                module, query, key, value, None, scaling=scaling, **kwargs
            )
    by_stretches = isinstance(attention_mask, Tensor) and attention_mask.dtype == torch.int64
    if by_stretches or isinstance(attention_mask, BlockMask):
        return _over_tree(query, key, value, attention_mask, scaling), None
    return sdpa_attention_forward(
        module, query, key, value, attention_mask, scaling=scaling, **kwargs
    )


_kernels: list[SDPBackend] = []  # SDPA's kernels for long rows; empty: torch chooses


def use_cudnn(on: bool, alone: bool = False) -> None:
    """If `on`, `attention` over long rows prefers cuDNN's kernels, else torch chooses. Check
    `cudnn_works` before. With `alone` it raises `RuntimeError` for inputs that cuDNN refuses."""
    global _kernels
    _kernels = [] if not on else IN_ORDER[:1] if alone else IN_ORDER


def rounded(length: int, multiple: int = 1) -> int:
    """Return the length to which rows are padded: a multiple, for cuDNN also of `MULTIPLE`."""
    if _kernels and length >= LONG:
        multiple = math.lcm(multiple, MULTIPLE)
    return -(-length // multiple) * multiple


def cudnn_works(
    device: torch.device, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype
) -> bool:
    """Try cuDNN's attention on this device: True if its values and gradients are those of torch's
    own kernels, apart from rounding."""
    if dtype.itemsize != 2 or torch.cuda.get_device_capability(device)[0] < HOPPER:
        return False
    numbers = torch.Generator(device).manual_seed(0)
    shapes = [(1, LONG, count, head_dim) for count in (heads, kv_heads, kv_heads)]
    inputs = [torch.randn(x, generator=numbers, device=device).to(dtype) for x in shapes]
    weights = torch.randn(shapes[0], generator=numbers, device=device)
    layer = nn.Module()
    layer.num_key_value_groups = heads // kv_heads

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        return attention(layer, query, key, value, None)[0]

    def run(on: bool) -> list[Tensor]:
        use_cudnn(on, alone=True)
        return _with_gradients(attend, inputs, weights)

    try:
        pairs = zip(run(True), run(False), strict=True)
        apart = max(float((a - b).float().abs().max() / b.float().abs().max()) for a, b in pairs)
    except RuntimeError:  # cuDNN refuses these inputs, or fails
        return False
    finally:
        use_cudnn(False)
    return apart <= CLOSE


@torch.compiler.disable  # compiled with a layer (trainer.compile), it would fit one tree only
def _over_tree(
    query: Tensor, key: Tensor, value: Tensor, attended: Tensor | BlockMask, scaling: float | None
) -> Tensor:
    """Compute `attention` by stretches or flex attention."""
    if isinstance(attended, Tensor):
        out = stretches.attention(query, key, value, attended, scaling)
        return out.transpose(1, 2).contiguous()
    # Uncompiled flex attention, on a CPU, is correct but as large and slow as a dense mask.
    flex = _compiled_flex() if query.device.type == "cuda" else flex_attention
    return flex(query, key, value, block_mask=attended, scale=scaling, enable_gqa=True).transpose(
        1, 2
    )


@functools.cache
def _compiled_flex() -> Callable[..., Tensor]:
    # With fullgraph, more shapes than torch's limit raise an error. Otherwise further ones would
    # run uncompiled, with L x L in float32.
    return torch.compile(flex_attention, fullgraph=True)


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, sdpa_mask)


def why_not_flex(
    device: torch.device, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype
) -> str:
    """Try flex attention. Returns why it can't train this shape on this device, "" if it can."""
    if device.type != "cuda":
        return "flex attention trains on GPUs only"
    for variable in OFF:
        if os.environ.get(variable) == "1":  # uncompiled: L x L in float32
            return f"{variable}=1 is set here, so torch compiles no flex attention"
    form = (heads, kv_heads, head_dim, dtype)
    # At the second length torch compiles once more, for all lengths.
    try:
        found = max(difference(device, *form, times) for times in (1, 3, 2))
    except Exception as error:  # errors of torch's, Triton's and C compilers: no common base class
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
    """Compare `attention` with float32 under a dense mask, over a tree of `times` PROBE_ROWS with
    random values. Returns the largest error of values and gradients, relative to the largest value
    or gradient. The global random generator is left as it was."""
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
    """Return the values and, on a GPU, each input's gradient of the values' sum times `weights`."""
    leaves = [x.clone().requires_grad_(x.device.type == "cuda") for x in inputs]
    values = function(*leaves)
    if not values.requires_grad:
        return [values]
    (values.float() * weights).sum().backward()
    return [values.detach(), *(leaf.grad for leaf in leaves)]
