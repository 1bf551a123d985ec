"""Attention over a prefix tree on a CPU, without masks: by stretches, which are runs of tokens
without a branch.

The tokens of a stretch attend to each other causally. Their descendants, which come after them in
the sequence, attend to the whole stretch. So each stretch takes one call of torch's causal kernel
and, if it has descendants, one of its full kernel. A token's outputs from all its ancestors'
stretches are merged by their sums of exponentials, like blocks in FlashAttention (arXiv 2205.14135)
and shared prefixes in Hydragen (2402.05099). Only attended pairs are computed; a dense mask
computes all L x L. The kernel's own backward pass computes each stretch's part of the gradient from
a token's merged output and sum.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def find(ends: Tensor) -> Tensor:
    """Return the stretches of a tree, (1, 1, S, 3) int64: the begin, the stop, and the stop of the
    last descendant of each. `ends` is `PrefixTree.ends`, (L,) int64, on the CPU. The four
    dimensions make transformers pass the result on unchanged, as a mask."""
    last = torch.cat([ends[1:] != ends[:-1], ends.new_ones(1, dtype=torch.bool)])
    stops = last.nonzero().flatten() + 1
    # torch would compile separately for a single stretch, so an empty one is added to it.
    if len(stops) == 1:
        stops = stops.repeat(2)
    begins = torch.cat([stops.new_zeros(1), stops[:-1]])
    return torch.stack([begins, stops, ends[stops - 1]], 1)[None, None]


def attention(
    query: Tensor, key: Tensor, value: Tensor, stretches: Tensor, scale: float | None
) -> Tensor:
    """Return attention's output over a tree, (1, heads, L, dv), for query (1, heads, L, d), key (1,
    kv_heads, L, d) and value (1, kv_heads, L, dv). `stretches` come from `find`."""
    width, of_values = query.shape[-1], value.shape[-1]
    scale = width**-0.5 if scale is None else scale
    # The kernel needs one head size for query, key and value, and latent attention has smaller
    # values. Padding with zeros changes nothing.
    query, key, value = (
        F.pad(x, (0, max(width, of_values) - x.shape[-1])) for x in (query, key, value)
    )
    return _Attention.apply(query, key, value, stretches[0, 0].tolist(), scale)[..., :of_values]


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, stretches: list, scale: float | None
    ) -> Tensor:
        keys, values = (_repeated(x, query.shape[1]) for x in (key, value))
        out = torch.empty_like(query.transpose(1, 2).contiguous()).transpose(1, 2)
        log_sums = query.new_empty(query.shape[:3], dtype=torch.float32)
        seen = 0  # tokens before this index already have an output to merge with
        for inside, at, causal in _calls(stretches):
            part = _forward(
                query[:, :, at], keys[:, :, inside], values[:, :, inside], 0.0, causal, scale=scale
            )
            fresh = min(max(seen, at.start), at.stop) - at.start
            _merge(out[:, :, at], log_sums[:, :, at], *part, fresh)
            seen = max(seen, at.stop)
        ctx.save_for_backward(query, key, value, out, log_sums)
        ctx.stretches, ctx.scale = stretches, scale
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple:
        query, key, value, out, log_sums = ctx.saved_tensors
        heads, kv_heads = query.shape[1], key.shape[1]
        keys, values = (_repeated(x, heads) for x in (key, value))
        of_query, of_keys, of_values = (torch.zeros_like(x) for x in (query, keys, values))
        for inside, at, causal in _calls(ctx.stretches):
            parts = _backward(
                gradient[:, :, at],
                query[:, :, at],
                keys[:, :, inside],
                values[:, :, inside],
                out[:, :, at],
                log_sums[:, :, at],
                0.0,
                causal,
                scale=ctx.scale,
            )
            of_query[:, :, at] += parts[0]
            of_keys[:, :, inside] += parts[1]
            of_values[:, :, inside] += parts[2]
        grouped = (x.unflatten(1, (kv_heads, -1)).sum(2) for x in (of_keys, of_values))
        return of_query, *grouped, None, None


def _calls(stretches: list) -> Iterator[tuple[slice, slice, bool]]:
    """Yield each kernel call: (a stretch, queries that attend to it, True if they are in it)."""
    for begin, stop, end in stretches:
        for at, causal in ((slice(begin, stop), True), (slice(stop, end), False)):
            if at.start < at.stop:
                yield slice(begin, stop), at, causal


def _repeated(x: Tensor, heads: int) -> Tensor:
    """Repeat keys or values for each head that uses them: the kernel has no grouped attention."""
    return x.repeat_interleave(heads // x.shape[1], 1)


def _merge(out: Tensor, sums: Tensor, part: Tensor, part_sums: Tensor, fresh: int) -> None:
    """Merge a further stretch's output and log-sums into `out` and `sums`, in place. Tokens from
    `fresh` on have no output yet."""
    out[:, :, fresh:], sums[:, :, fresh:] = part[:, :, fresh:], part_sums[:, :, fresh:]
    old, new = sums[:, :, :fresh], part_sums[:, :, :fresh]
    both = torch.logaddexp(old, new)
    out[:, :, :fresh].lerp_(part[:, :, :fresh], (new - both).exp().unsqueeze(-1).to(out.dtype))
    old.copy_(both)
