"""Which rows of a batch go into which micro-batch of which trainer rank.

Pure Python, no torch: the coordinator plans, the trainer ranks follow. ZeRO's collectives need the same
number of micro-batches on every rank, so a rank may get empty ones (it runs a padding row of weight 0).
Left out: packing several trajectories into one row, which needs attention kernels that CPUs lack.
"""

from __future__ import annotations

import heapq


def plan_micro_batches(lengths: list[int], ranks: int, micro_batch_tokens: int,
                       updates: int) -> list[list[list[list[int]]]]:
    """plan[rank][update][micro-batch] -> rows of the batch; every row once, the same plan for the same input.

    `lengths` are tokens per row. A micro-batch's padded size, rows x longest, is at most
    `micro_batch_tokens`. Within an update every rank has the same number of micro-batches, as few as
    the limit allows, and padded tokens are balanced over ranks. Each update gets a like share of long
    and short rows. A rank's largest micro-batch comes first: if memory is short, it shows at once.

    Raises `ValueError` for a row that is too long and for fewer rows than ranks x updates.
    """
    for row, length in enumerate(lengths):
        if not 0 < length <= micro_batch_tokens:
            raise ValueError(f"row {row} has {length} tokens; a row must have 1 to trainer.micro_batch_tokens="
                             f"{micro_batch_tokens}")
    if len(lengths) < ranks * updates:
        raise ValueError(f"{len(lengths)} trajectories cannot give each of trainer.ranks={ranks} ranks one in each of "
                         f"trainer.updates_per_step={updates} updates; {ranks * updates} are needed")
    order = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
    plan: list[list[list[list[int]]]] = [[] for _ in range(ranks)]
    for update in range(updates):
        rows = [row for place, row in enumerate(order) if _snake(place, updates) == update]
        bins = _partition(rows, lengths, ranks, micro_batch_tokens)
        for rank, micro_batches in enumerate(_deal(bins, lengths, ranks)):
            plan[rank].append(micro_batches)
    return plan


def padded_tokens(rows: list[int], lengths: list[int]) -> int:
    """Rows x longest: what a micro-batch costs."""
    return len(rows) * max((lengths[row] for row in rows), default=0)


def _snake(place: int, updates: int) -> int:
    """0 1 2 2 1 0 0 1 2 ...: no update gets the longer row of every round."""
    turn, step = divmod(place, updates)
    return step if turn % 2 == 0 else updates - 1 - step


def _fill(rows: list[int], lengths: list[int], limit: int) -> list[list[int]]:
    """Rows, longest first, cut into as few runs of at most `limit` padded tokens as there can be."""
    bins: list[list[int]] = []
    for row in rows:
        if bins and (len(bins[-1]) + 1) * lengths[bins[-1][0]] <= limit:
            bins[-1].append(row)
        else:
            bins.append([row])
    return bins


def _partition(rows: list[int], lengths: list[int], ranks: int, limit: int) -> list[list[int]]:
    """A multiple of `ranks` bins of like size: the smallest limit that still gives no more of them."""
    count = -(-len(_fill(rows, lengths, limit)) // ranks) * ranks
    low, high = lengths[rows[0]], limit  # a limit of `high` is known to do
    while low < high:
        middle = (low + high) // 2
        if len(_fill(rows, lengths, middle)) <= count:
            high = middle
        else:
            low = middle + 1
    bins = _fill(rows, lengths, high)
    while len(bins) < count:
        largest = max(bins, key=lambda b: (len(b) > 1, padded_tokens(b, lengths)))
        if len(largest) == 1:
            bins.append([])
            continue
        at = bins.index(largest)
        bins[at:at + 1] = [largest[:len(largest) // 2], largest[len(largest) // 2:]]
    return bins


def _deal(bins: list[list[int]], lengths: list[int], ranks: int) -> list[list[list[int]]]:
    """Largest first, each to the rank with the least work that still has room: as many bins to every rank."""
    dealt: list[list[list[int]]] = [[] for _ in range(ranks)]
    loads = [(0, rank) for rank in range(ranks)]
    for rows in sorted(bins, key=lambda b: -padded_tokens(b, lengths)):
        load, rank = heapq.heappop(loads)
        dealt[rank].append(rows)
        if len(dealt[rank]) < len(bins) // ranks:
            heapq.heappush(loads, (load + padded_tokens(rows, lengths), rank))
    return dealt
