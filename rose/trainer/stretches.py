"""Attention over a prefix tree on a CPU, without masks: by stretches, which are runs of tokens
without a branch.

The tokens of a stretch attend to each other causally, and all their descendants, which stand behind
them, attend to all of them. So a stretch takes a call of torch's causal kernel and one of its full
kernel, on slices. A token's outputs from all its ancestors' stretches are merged by their sums of
exponentials, as blocks are in FlashAttention (arXiv 2205.14135) and shared prefixes in Hydragen
(2402.05099). Only attended pairs are computed, where a dense mask computes all L x L. The backward
pass is the kernel's own: given a token's merged output and sum, it gives each stretch's part of the
gradient.
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
    """Ends (L,) int64 of a tree on the CPU -> (1, 1, S, 3) int64: for each of S stretches, in
    order, its begin, its stop, and the stop of its last descendant. The result has four dimensions
    because transformers passes such masks on unchanged."""
    last = torch.cat([ends[1:] != ends[:-1], ends.new_ones(1, dtype=torch.bool)])
    stops = last.nonzero().flatten() + 1
    # An empty stretch is added to a single one, for which torch would compile separately.
    if len(stops) == 1:
        stops = stops.repeat(2)
    begins = torch.cat([stops.new_zeros(1), stops[:-1]])
    return torch.stack([begins, stops, ends[stops - 1]], 1)[None, None]


def attention(
    query: Tensor, key: Tensor, value: Tensor, stretches: Tensor, scale: float | None
) -> Tensor:
    """Query (1, heads, L, d), key (1, kv_heads, L, d), value (1, kv_heads, L, dv), stretches as
    from `find` -> output (1, heads, L, dv)."""
    width, of_values = query.shape[-1], value.shape[-1]
    scale = width**-0.5 if scale is None else scale
    # The kernel needs one size for all three, and latent attention has smaller values. So they are
    # padded with zeros, which change nothing.
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
        sums = query.new_empty(query.shape[:3], dtype=torch.float32)  # logarithms
        seen = 0  # tokens before this index already have an output to merge with
        for inside, at, causal in _calls(stretches):
            part = _forward(
                query[:, :, at], keys[:, :, inside], values[:, :, inside], 0.0, causal, scale=scale
            )
            fresh = min(max(seen, at.start), at.stop) - at.start
            _merge(out[:, :, at], sums[:, :, at], *part, fresh)
            seen = max(seen, at.stop)
        ctx.save_for_backward(query, key, value, out, sums)
        ctx.stretches, ctx.scale = stretches, scale
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple:
        query, key, value, out, sums = ctx.saved_tensors
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
                sums[:, :, at],
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
    """Yield (a stretch, queries that attend to it, True if they are its own) of each call."""
    for begin, stop, end in stretches:
        for at, causal in ((slice(begin, stop), True), (slice(stop, end), False)):
            if at.start < at.stop:
                yield slice(begin, stop), at, causal


def _repeated(x: Tensor, heads: int) -> Tensor:
    """Repeat keys or values for each head that uses them: the kernel has no grouped attention."""
    return x.repeat_interleave(heads // x.shape[1], 1)


def _merge(out: Tensor, sums: Tensor, part: Tensor, its_sums: Tensor, fresh: int) -> None:
    """Merge one more stretch's output and log-sums into a slice's, in place. Tokens from `fresh` on
    have no output yet."""
    out[:, :, fresh:], sums[:, :, fresh:] = part[:, :, fresh:], its_sums[:, :, fresh:]
    old, new = sums[:, :, :fresh], its_sums[:, :, :fresh]
    both = torch.logaddexp(old, new)
    out[:, :, :fresh].lerp_(part[:, :, :fresh], (new - both).exp().unsqueeze(-1).to(out.dtype))
    old.copy_(both)
