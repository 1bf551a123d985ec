"""The tensors of one micro-batch, from trajectories: padded rows, and a prefix tree if the rows are
computed as one.

Rows are padded on the right. With causal attention no real token attends to the padding, so there
is no attention mask. That keeps the fast attention path, and gives the same numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rose.protocol import Trajectory, unpack_floats, unpack_tokens
from rose.trainer import prefix_tree
from rose.trainer.prefix_tree import PrefixTree
from rose.trainer.router_replay import RouterReplay


@dataclass(frozen=True)
class MicroBatch:
    """B rows, of which the longest has T + 1 tokens. Position t of `mask`, `targets`, `behaviour`,
    `versions` and `turns` belongs to the token that `inputs[:, : t + 1]` predicts."""

    rows: Tensor  # (B,) int64: row numbers in the whole batch
    inputs: Tensor  # (B, T) int64
    targets: Tensor  # (B, T) int64
    mask: Tensor  # (B, T) float32: 1 where the policy generated the token
    behaviour: Tensor  # (B, T) float32: the engine's log-probability; 0 where mask is 0
    versions: Tensor  # (B, T) int32: policy version that generated the token; -1 where mask is 0
    # (B, T) int64: number of the turn that generated the token; 0 where mask is 0 or it's unknown
    turns: Tensor
    # The prefix tree of `inputs`. Each row ends with the token that predicts the policy's last one.
    tree: PrefixTree | None
    # With router replay, (B, T, layers, top k) int16: the experts of `inputs`, -1 where unrecorded.
    experts: Tensor | None


def collate(
    rows: list[int],
    trajectories: dict[int, Trajectory],
    vocabulary: int,
    trees: bool = False,
    replay: RouterReplay | None = None,
) -> MicroBatch:
    """Make the micro-batch of `rows`. Without rows it is one padding row with nothing to learn, so
    that the rank still takes part in the collectives of forward and backward. With `trees`, two or
    more rows get a prefix tree.

    Raises `ValueError` that names a trajectory whose fields contradict each other or the model."""
    fields = [_fields(trajectories[row], vocabulary) for row in rows]
    width = max([2, *(len(tokens) for tokens, *_ in fields)])
    shape = (max(1, len(rows)), width)
    tokens, versions = np.zeros(shape, np.int64), np.full(shape, -1, np.int32)
    mask, behaviour = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
    turns = np.zeros(shape, np.int64)
    for i, (row_tokens, row_mask, row_logprobs, row_versions, row_turns) in enumerate(fields):
        end = len(row_tokens)
        tokens[i, :end] = row_tokens
        mask[i, :end] = row_mask
        behaviour[i, :end] = np.where(row_mask, row_logprobs, 0)
        versions[i, :end] = np.where(row_mask, row_versions, -1)
        turns[i, :end][row_mask == 1] = row_turns
    tree = None
    if trees and len(rows) > 1:
        # inputs up to each row's last target
        needed = [int(np.flatnonzero(row).max(initial=1)) for row in mask]
        tree = prefix_tree.build(tokens[:, :-1], np.array(needed))
    inputs = torch.from_numpy(tokens[:, :-1].copy())
    arrays = (tokens, mask, behaviour, versions, turns)
    shifted = (torch.from_numpy(array[:, 1:].copy()) for array in arrays)
    experts = None
    if replay is not None:
        chosen = np.full((*inputs.shape, replay.layers, replay.top_k), -1, np.int16)
        for i, row in enumerate(rows):
            t = trajectories[row]
            found = replay.unpack(t.experts, len(fields[i][0]), t.id)[: chosen.shape[1]]
            chosen[i, : len(found)] = found
        experts = torch.from_numpy(chosen)
    return MicroBatch(torch.tensor(rows, dtype=torch.int64), inputs, *shifted, tree, experts)


def _fields(t: Trajectory, vocabulary: int) -> tuple[np.ndarray, ...]:
    """Check a trajectory and return (tokens, mask, logprobs, versions), each (T,), and the turn of
    each token whose mask is 1."""
    tokens, mask = unpack_tokens(t.tokens), np.frombuffer(t.mask, np.uint8)
    logprobs, versions = unpack_floats(t.logprobs), unpack_tokens(t.versions)
    if not len(tokens) == len(mask) == len(logprobs) == len(versions) or not len(tokens):
        raise ValueError(
            f"trajectory {t.id}: tokens, mask, logprobs, versions have {len(tokens)}, {len(mask)}, "
            f"{len(logprobs)}, {len(versions)} entries; they must be equally many, at least 1"
        )
    if tokens.min() < 0 or tokens.max() >= vocabulary:
        raise ValueError(
            f"trajectory {t.id}: token ids from {tokens.min()} to {tokens.max()}; "
            f"the model has 0 to {vocabulary - 1}"
        )
    if mask[0] or int(mask.sum()) != t.response_tokens or mask.max() > 1:
        raise ValueError(
            f"trajectory {t.id}: its mask marks {int(mask.sum())} tokens (first: {mask[0]}), "
            f"response_tokens is {t.response_tokens}; they must agree, and the first token is "
            "always the prompt's"
        )
    if not np.isfinite(logprobs[mask == 1]).all():
        raise ValueError(f"trajectory {t.id}: an engine's log-probability is not finite")
    return tokens, mask, logprobs, versions, _turns(t)


def _turns(t: Trajectory) -> np.ndarray:
    """Return the turn that generated each response token, (response_tokens,) int64; 0: unknown."""
    if not t.turn_tokens and not t.turn_rewards:
        return np.zeros(t.response_tokens, np.int64)
    numbers, counts = np.array(t.turn_tokens, np.int64).reshape(-1, 2).T
    most = len(t.turn_rewards) or t.turns
    if counts.sum() != t.response_tokens or not set(numbers.tolist()) <= set(range(most)):
        raise ValueError(
            f"trajectory {t.id}: its turns {t.turn_tokens} (turn, tokens) don't make up its "
            f"{t.response_tokens} response tokens, or are not among its {most} turns"
        )
    return np.repeat(numbers, counts)
