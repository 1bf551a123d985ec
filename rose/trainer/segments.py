"""The segments of a batch: turns that trajectories share because they fork off each other.

The coordinator finds the segments for tree algorithms, so this file imports no torch. A segment is
a run of turns that the same trajectories share, so a tree of rollouts is a tree of segments. A tree
algorithm trains each token once, in the first row that has its segment. Every other algorithm takes
the trajectories whole, as if each had begun with the prompt.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable

import msgspec
import numpy as np
import xxhash

from rose.protocol import Trajectory, pack_tokens


def find(trajectories: list[Trajectory]) -> list[list[int]]:
    """List the segment number of each turn of each trajectory; [] if no trajectory forked."""
    if not any(t.inherited for t in trajectories):
        return []
    sharing: dict[Hashable, list[int]] = defaultdict(list)  # turn -> rows that have it
    turns = [_turns(t) for t in trajectories]
    for row, found in enumerate(turns):
        for turn in found:
            sharing[turn].append(row)
    numbers: dict[tuple[int, ...], int] = {}
    return [
        [numbers.setdefault(tuple(sharing[turn]), len(numbers)) for turn in found]
        for found in turns
    ]


def _turns(t: Trajectory) -> list[Hashable]:
    """Identify each turn by the trajectory that made it and a hash of all tokens up to its end. So
    turns count as the same only if all these tokens are the same."""
    return [
        (t.group, maker, turn, xxhash.xxh3_128_digest(t.tokens[: 4 * _end(t, turn + 1)]))
        for turn, maker in enumerate(t.makers)
    ]


def _end(t: Trajectory, turns: int) -> int:
    """Count the tokens up to the end of the first `turns` turns; 0 if these generated none."""
    made = sum(tokens for _, tokens in t.turn_tokens[:turns])
    return int(np.flatnonzero(np.frombuffer(t.mask, np.uint8))[made - 1]) + 1 if made else 0


def samples(
    trajectories: list[Trajectory], segments: list[list[int]]
) -> list[tuple[Trajectory, int]]:
    """List the rows to train, as (row, index of its trajectory). Without `segments`, each leaf of
    an agent's histories is a row (`Trajectory.samples`). With `segments`, each trajectory is a row,
    in which turns that an earlier row trains are context only."""
    if not segments:
        return [(s, owner) for owner, t in enumerate(trajectories) for s in t.samples()]
    seen: set[int] = set()
    found = []
    for row, t in enumerate(trajectories):
        shared = sum(number in seen for number in segments[row])
        seen.update(segments[row])
        found.append((_without(t, shared) if shared else t, row))
    return found


def _without(t: Trajectory, turns: int) -> Trajectory:
    """Copy a trajectory with mask 0 for its first `turns` turns."""
    end = _end(t, turns)
    return msgspec.structs.replace(
        t,
        mask=bytes(end) + t.mask[end:],
        logprobs=bytes(4 * end) + t.logprobs[4 * end :],
        versions=pack_tokens([-1]) * end + t.versions[4 * end :],
        response_tokens=sum(t.mask[end:]),
        turn_tokens=t.turn_tokens[turns:],
    )
