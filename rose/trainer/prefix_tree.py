"""Rows that begin alike, as one prefix tree: what they share is computed once, both ways.

The members of a GRPO group share their prompt, all rows their system message and tools. The tree's
tokens stand in depth-first order in one sequence; a token attends to its ancestors only, and its
position is its depth. So every row gets the numbers, and every weight the gradient, that separate
rows would give (Tree Training, arXiv 2511.00413; here the whole micro-batch is one tree, and
autograd adds up the gradients of shared tokens). Holds for models whose layers all attend to the
whole context by rotary positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rose.trainer.batching import common


class PrefixTree(NamedTuple):
    """L distinct prefixes of B rows."""

    tokens: Tensor  # (L,) int64
    depths: Tensor  # (L,) int64: position in each row that has it
    ends: Tensor  # (L,) int64: its descendants are the tokens behind it and before this one
    # (B, T) int64: where each row's prefix stands in the tree; 0 beyond the row's length
    nodes: Tensor

    def attention(self) -> Tensor:
        """(1, 1, L, L) bool: whether a token (third) attends to one (fourth)."""
        at = torch.arange(len(self.tokens), device=self.tokens.device)
        return ((at <= at[:, None]) & (at[:, None] < self.ends))[None, None]

    def to(self, device: torch.device) -> PrefixTree:
        return PrefixTree(*(tensor.to(device, non_blocking=True) for tensor in self))


def build(inputs: np.ndarray, lengths: np.ndarray) -> PrefixTree:
    """The tree of inputs (B, T) int64, of which row i counts up to lengths[i]."""
    order = sorted(range(len(inputs)), key=lambda i: inputs[i, : lengths[i]].tolist())
    nodes = np.zeros(inputs.shape, np.int64)
    tokens, depths, ends = (np.empty(int(lengths.sum()), np.int64) for _ in range(3))
    # `path`: the last row's nodes
    size, path, previous = 0, np.empty(0, np.int64), np.empty(0, np.int64)
    for i in order:
        row = inputs[i, : lengths[i]]
        shared = common(row, previous)
        ends[path[shared:]] = size
        grown = size + len(row) - shared
        tokens[size:grown], depths[size:grown] = row[shared:], np.arange(shared, len(row))
        path = np.concatenate([path[:shared], np.arange(size, grown)])
        nodes[i, : len(row)] = path
        size, previous = grown, row
    ends[path] = size
    return PrefixTree(
        *(torch.from_numpy(array[:size].copy()) for array in (tokens, depths, ends)),
        torch.from_numpy(nodes),
    )


def build_from_rows(shared: Sequence[int], own: Sequence[int]) -> PrefixTree:
    """A tree of numbers: row i is the first shared[i] tokens of all, then own[i] of its own."""
    lengths = np.add(shared, own)
    inputs = np.zeros((len(lengths), int(lengths.max())), np.int64)
    for row, (begin, end) in enumerate(zip(shared, lengths, strict=False)):
        inputs[row, begin:end] = row + 1
    return build(inputs, lengths)


def obstacle(config: Any) -> str | None:
    """What in an HF model's config forbids the tree; None if nothing does."""
    layers = set(getattr(config, "layer_types", None) or ["full_attention"]) - {"full_attention"}
    if layers:
        return f"layers of the kind {', '.join(sorted(layers))}"
    if getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True):
        return f"sliding_window={config.sliding_window}"
    if not (getattr(config, "rope_parameters", None) or getattr(config, "rope_theta", None)):
        return "positions that are not rotary"
    return None
