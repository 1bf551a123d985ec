"""A prefix tree of rows that begin alike: forward and backward compute shared tokens once.

The members of a GRPO group share their prompt, and all rows their system message and tools. The
tree's tokens stand in depth-first order in one sequence. A token attends to its ancestors only, and
its position is its depth. So rows get the same values, and weights the same gradient, as with
separate rows (Tree Training, arXiv 2511.00413; here the whole micro-batch is one tree, and autograd
adds up the gradients of shared tokens). This holds only for models with rotary positions whose
layers all attend to the whole context.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rose.trainer.batching import common


class PrefixTree(NamedTuple):
    """L nodes, the distinct prefixes of B rows. A node is the last token of its prefix."""

    tokens: Tensor  # (L,) int64
    depths: Tensor  # (L,) int64: the token's position in the rows
    ends: Tensor  # (L,) int64: index behind the node's last descendant
    # (B, T) int64: index in the tree of each of a row's prefixes; 0 beyond its length
    nodes: Tensor

    def attention(self) -> Tensor:
        """Return the dense mask (1, 1, L, L) bool. [0, 0, i, j] is True if token i attends to j."""
        at = torch.arange(len(self.tokens), device=self.tokens.device)
        return ((at <= at[:, None]) & (at[:, None] < self.ends))[None, None]

    def to(self, device: torch.device) -> PrefixTree:
        return PrefixTree(*(tensor.to(device, non_blocking=True) for tensor in self))


def build(inputs: np.ndarray, lengths: np.ndarray) -> PrefixTree:
    """Build the tree of inputs (B, T) int64, of which row i has lengths[i] tokens."""
    order = sorted(range(len(inputs)), key=lambda i: inputs[i, : lengths[i]].tolist())
    nodes = np.zeros(inputs.shape, np.int64)
    tokens, depths, ends = (np.empty(int(lengths.sum()), np.int64) for _ in range(3))
    # `path`: nodes of the previous row
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
    """Build a tree of made-up rows: row i has shared[i] tokens of a common text, then own[i]."""
    lengths = np.add(shared, own)
    inputs = np.zeros((len(lengths), int(lengths.max())), np.int64)
    for row, (begin, end) in enumerate(zip(shared, lengths, strict=False)):
        inputs[row, begin:end] = row + 1
    return build(inputs, lengths)


def obstacle(config: Any) -> str | None:
    """Return what in an HF model's config excludes prefix trees; None if nothing does."""
    layers = set(getattr(config, "layer_types", None) or ["full_attention"]) - {"full_attention"}
    if layers:
        return f"layers of the kind {', '.join(sorted(layers))}"
    if getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True):
        return f"sliding_window={config.sliding_window}"
    if not (getattr(config, "rope_parameters", None) or getattr(config, "rope_theta", None)):
        return "positions that are not rotary"
    return None
