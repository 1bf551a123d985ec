"""The plan of a batch: which rows go into which micro-batch of which trainer rank.

The coordinator makes the plan, so this file imports no torch. ZeRO's collectives need the same
number of micro-batches on every rank. So a rank may get empty ones, in which it computes a padding
row of weight 0. A micro-batch is either rows padded to the longest, or one prefix tree
(rose/trainer/prefix_tree.py). `plan_batch` chooses the cheaper form for a whole batch.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from rose import protocol as p
from rose.config import ModelShape, Trainer
from rose.protocol import Costs

# Most logits that the head computes in one chunk. On a CPU they take 128 MiB in float32; larger
# chunks were no faster. On a GPU they take 1 GiB in bfloat16, and their gradient overwrites them.
# KEPT, 4 GiB, is for runs without gradient checkpointing: the logits of a single chunk are kept.
LOGIT_ELEMENTS, LOGIT_ELEMENTS_GPU, LOGIT_ELEMENTS_KEPT = 2**25, 2**29, 2**31
# Most logits of a chunk on a GPU whose host can't compile kernels. torch's operations take 14 bytes
# for each logit, and the kernels 2.
LOGIT_ELEMENTS_PLAIN = 2**26
# The cost of a pair of tokens in a tree's attention, relative to a pair in a causal kernel. MASKED
# holds for a dense mask on a CPU, SPARSE for stretches and for flex attention that isn't measured.
MASKED = 2.0
SPARSE = 1.3
# Unattended pairs that flex attention computes for each token: it skips only whole blocks of 128.
PARTLY = 128

Plan = list[list[list[list[int]]]]  # [rank][update][micro-batch] -> rows of the batch


class Padded:
    """Rows padded to the longest: a micro-batch computes (number of rows) x (longest row) tokens.
    In `order`, rows that are cheap to compute together are adjacent."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths = lengths
        self.order = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))

    def grown(self, size: int, rows: list[int], row: int) -> int:
        """Return the tokens that a micro-batch of `rows` and `row` computes. Without `row`, which
        comes after them in `order`, it computes `size` tokens."""
        return (len(rows) + 1) * self.lengths[rows[0] if rows else row]


class Shared:
    """Rows as a prefix tree: tokens that rows have in common at their beginning count once."""

    def __init__(self, rows: list[np.ndarray]) -> None:
        """`rows` hold each row's tokens, (T,) int32."""
        self.lengths = [len(row) for row in rows]
        self.order = sorted(range(len(rows)), key=lambda row: (rows[row].tolist(), row))
        self._place = {row: place for place, row in enumerate(self.order)}
        # Tokens that each row of `order` shares with the row before it. Two rows farther apart
        # share the minimum over the rows from one to the other.
        self._shared = [0, *(common(rows[a], rows[b]) for a, b in pairwise(self.order))]

    def grown(self, size: int, rows: list[int], row: int) -> int:
        """See `Padded.grown`."""
        if not rows:
            return self.lengths[row]
        return size + self.lengths[row] - self._in_common(rows[-1], row)

    def pairs(self, rows: list[int], dense: bool) -> float:
        """Count the pairs of tokens that attention computes in the tree of `rows`. A `dense` mask
        computes all pairs, otherwise it is the attended pairs and `PARTLY` for each token."""
        if dense:
            return float(size_of(rows, self) ** 2)
        # tokens that each row shares with the row before it
        depths = [0, *(self._in_common(a, b) for a, b in pairwise(rows))]
        return sum(
            (self.lengths[row] * (self.lengths[row] + 1) - depth * (depth + 1)) / 2
            + PARTLY * (self.lengths[row] - depth)
            for row, depth in zip(rows, depths, strict=False)
        )

    def _in_common(self, row: int, later: int) -> int:
        """Count the tokens that two rows share. `later` comes after `row` in `order`."""
        return min(self._shared[self._place[row] + 1 : self._place[later] + 1])


Packing = Padded | Shared  # ways to make a micro-batch's tokens of rows


def common(a: np.ndarray, b: np.ndarray) -> int:
    """Count the tokens that two rows have in common at their beginning."""
    most = min(len(a), len(b))
    different = np.flatnonzero(a[:most] != b[:most])
    return int(different[0]) if len(different) else most


def size_of(rows: list[int], packing: Packing) -> int:
    """Count the tokens that a micro-batch of these rows computes."""
    size = 0
    for at, row in enumerate(rows):
        size = packing.grown(size, rows[:at], row)
    return size


def plan_batch(
    rows: list[np.ndarray],
    ranks: int,
    micro_batch_tokens: int,
    updates: int,
    costs: Costs | None,
    part: bool = False,
) -> tuple[Plan, bool]:
    """Return (plan, True if its micro-batches are prefix trees) for rows of tokens (T,) int32.

    Without `costs` there are no trees. With `part` the rows are a part of a batch, and may be too
    few for all ranks. Raises what `plan_micro_batches` raises."""
    padded = Padded([len(row) for row in rows])
    plain = plan_micro_batches(padded, ranks, micro_batch_tokens, updates, part)
    if costs is None:
        return plain, False
    shared = Shared(rows)
    trees = plan_micro_batches(shared, ranks, micro_batch_tokens, updates, part)
    plain_cost = sum(
        costs.token * size_of(m, padded) + costs.causal * len(m) * padded.lengths[m[0]] ** 2 / 2
        for m in _micro_batches(plain)
    )
    tree_cost = sum(
        costs.token * size_of(m, shared) + costs.tree * shared.pairs(m, costs.dense)
        for m in _micro_batches(trees)
    )
    return (trees, True) if tree_cost < plain_cost else (plain, False)


def _micro_batches(plan: Plan) -> list[list[int]]:
    """List all micro-batches of a plan that are not empty."""
    return [m for rank in plan for update in rank for m in update if m]


def logit_elements(t: Trainer, on_gpu: bool) -> int:
    """Return the most logits that the head computes in one chunk."""
    on_device = LOGIT_ELEMENTS_KEPT if t.gradient_checkpointing is False else LOGIT_ELEMENTS_GPU
    return on_device if on_gpu else LOGIT_ELEMENTS


def flops(shape: ModelShape, sparse: bool = False) -> Costs:
    """Estimate the costs in FLOPs: 2 for each weight of a layer and token, 4 for each pair of
    tokens and channel. `sparse`: in a tree only attended pairs are computed, else all pairs."""
    attention = shape.heads * shape.head_dim
    keys = shape.kv_heads * shape.head_dim
    weights = shape.hidden * (2 * attention + 2 * keys + 3 * shape.mlp_width + shape.experts)
    tree = 4.0 * attention * (SPARSE if sparse else MASKED)
    return Costs(2.0 * weights, 4.0 * attention, tree, not sparse)


def plan_micro_batches(
    packing: Packing, ranks: int, micro_batch_tokens: int, updates: int, part: bool = False
) -> Plan:
    """Return plan[rank][update][micro-batch] -> rows of the batch. Every row occurs once, and the
    same input gives the same plan.

    No micro-batch computes more than `micro_batch_tokens` tokens. Within an update every rank has
    the same number of micro-batches, as few as the limit allows, and sizes are balanced over ranks.
    Each update gets about as many rows from every range of the packing's order. A rank's largest
    micro-batch comes first, so that a lack of memory shows at once.

    Raises `ValueError` for a row that is too long. Unless the rows are a `part` of a batch, also
    raises it for fewer rows than ranks x updates."""
    for row, length in enumerate(packing.lengths):
        if not 0 < length <= micro_batch_tokens:
            raise ValueError(
                f"row {row} has {length} tokens; a row must have 1 to trainer.micro_batch_tokens="
                f"{micro_batch_tokens}"
            )
    if len(packing.lengths) < ranks * updates and not part:
        raise ValueError(
            f"{len(packing.lengths)} trajectories cannot give each of {ranks} trainer ranks, or "
            "groups that share rows (trainer.sequence_parallel), "
            f"one in each of trainer.updates_per_step={updates} updates; {ranks * updates} are "
            "needed"
        )
    plan: Plan = [[] for _ in range(ranks)]
    for update in range(updates):
        rows = [row for place, row in enumerate(packing.order) if _snake(place, updates) == update]
        bins = _partition(rows, packing, ranks, micro_batch_tokens)
        for rank, micro_batches in enumerate(_deal(bins, packing, ranks)):
            plan[rank].append(micro_batches)
    return plan


def _snake(place: int, updates: int) -> int:
    """Return the update of the row at `place`: 0 1 2 2 1 0 0 1 2 ... This balances row lengths."""
    turn, step = divmod(place, updates)
    return step if turn % 2 == 0 else updates - 1 - step


def _fill(rows: list[int], packing: Packing, limit: int) -> list[list[int]]:
    """Cut rows, in their order, into as few runs of at most `limit` tokens as possible."""
    bins: list[list[int]] = []
    size = 0
    for row in rows:
        grown = packing.grown(size, bins[-1], row) if bins else limit + 1
        if grown <= limit:
            bins[-1].append(row)
            size = grown
        else:
            bins.append([row])
            size = packing.grown(0, [], row)
    return bins


def _partition(rows: list[int], packing: Packing, ranks: int, limit: int) -> list[list[int]]:
    """Cut rows into bins of similar size. Their number is the smallest multiple of `ranks` that
    `limit` allows. A bisection finds the smallest limit that needs no more bins. If it needs fewer,
    the largest bins are halved. Once every bin has one row, empty bins are added."""
    count = -(-len(_fill(rows, packing, limit)) // ranks) * ranks
    low, high = max(packing.lengths[row] for row in rows), limit  # `high` is known to suffice
    while low < high:
        middle = (low + high) // 2
        if len(_fill(rows, packing, middle)) <= count:
            high = middle
        else:
            low = middle + 1
    bins = _fill(rows, packing, high)
    while len(bins) < count:
        largest = max(bins, key=lambda b: (len(b) > 1, size_of(b, packing)))
        if len(largest) == 1:
            bins.append([])
            continue
        at = bins.index(largest)
        bins[at : at + 1] = [largest[: len(largest) // 2], largest[len(largest) // 2 :]]
    return bins


def _deal(bins: list[list[int]], packing: Packing, ranks: int) -> list[list[list[int]]]:
    """Deal the bins, the largest first, each to the rank with the least work so far. Every rank
    gets the same number of bins."""
    dealt: list[list[list[int]]] = [[] for _ in range(ranks)]
    loads = [(0, rank) for rank in range(ranks)]
    for rows in sorted(bins, key=lambda b: -size_of(b, packing)):
        load, rank = heapq.heappop(loads)
        dealt[rank].append(rows)
        if len(dealt[rank]) < len(bins) // ranks:
            heapq.heappush(loads, (load + size_of(rows, packing), rank))
    return dealt


PART_BYTES = 16 * 2**20  # most bytes of trajectories in one message
TOKEN_BYTES = 13  # bytes a token: its id, log-probability and version (4 each) and mask (1)


def train_messages(
    step: int,
    summary: p.BatchSummary,
    micro_batches: list[list[list[int]]],
    trees: bool,
    samples: list[p.Trajectory],
    owners: Sequence[int] = (),
    more: bool = False,
) -> list[p.Message]:
    """Build a rank's messages of a step: a `TrainStep`, then `TrainPart`s with the samples of the
    rank's rows, about `PART_BYTES` each."""
    rows = [row for update in micro_batches for batch in update for row in batch]
    parts: list[list[int]] = [[]]
    size = 0
    for row in rows:
        nbytes = TOKEN_BYTES * len(samples[row].mask) + len(samples[row].experts)
        if parts[-1] and size + nbytes > PART_BYTES:
            parts.append([])
            size = 0
        parts[-1].append(row)
        size += nbytes
    messages: list[p.Message] = [
        p.TrainStep(step, summary, micro_batches, trees, len(parts), list(owners), more)
    ]
    for at, part in enumerate(parts):
        messages.append(p.TrainPart(step, at, part, [samples[row] for row in part]))
    return messages
