"""A trainer rank's share of a step, as messages of bounded size. Pure."""

from __future__ import annotations

from rose import protocol as p

PART_BYTES = 16 * 2**20  # of trajectories in one message
TOKEN_BYTES = 13  # token, log-probability and version of 4 bytes each, mask of 1


def train_messages(
    step: int,
    summary: p.BatchSummary,
    micro_batches: list[list[list[int]]],
    trees: bool,
    trajectories: list[p.Trajectory],
) -> list[p.Message]:
    """`TrainStep`, then the trajectories of the rank's rows in as many `TrainPart`s as their size
    asks for."""
    rows = [row for update in micro_batches for batch in update for row in batch]
    parts: list[list[int]] = [[]]
    size = 0
    for row in rows:
        nbytes = TOKEN_BYTES * len(trajectories[row].mask)
        if parts[-1] and size + nbytes > PART_BYTES:
            parts.append([])
            size = 0
        parts[-1].append(row)
        size += nbytes
    filled = [
        p.TrainPart(step, at, part, [trajectories[row] for row in part])
        for at, part in enumerate(parts)
    ]
    return [p.TrainStep(step, summary, micro_batches, trees, len(parts)), *filled]
