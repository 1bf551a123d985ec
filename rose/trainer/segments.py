"""Which turns the trajectories of a batch have in common, where they fork off each other.

No torch: the coordinator finds the segments, algorithms of trees read them. A segment is the turns
that the same trajectories share, so a tree of rollouts is nested segments. What an algorithm of
trees trains of a segment stands in the first of its rows alone, each token once; every other
algorithm takes the trajectories whole, as if each had begun with the prompt.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable

import msgspec
import numpy as np
import xxhash

from rose.protocol import Trajectory, pack_tokens


def find(trajectories: list[Trajectory]) -> list[list[int]]:
    """(N,): of each turn, the number of its segment; [] if no trajectory forked off another."""
    if not any(t.inherited for t in trajectories):
        return []
    sharing: dict[Hashable, list[int]] = defaultdict(list)  # a turn -> its rows
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
    """Each turn by who made it and all tokens up to its end: that these are the same doesn't rest
    on what a trajectory says of itself."""
    return [
        (t.group, maker, turn, xxhash.xxh3_128_digest(t.tokens[: 4 * _end(t, turn + 1)]))
        for turn, maker in enumerate(t.makers)
    ]


def _end(t: Trajectory, turns: int) -> int:
    """Where its first `turns` turns end, in tokens; 0 if they have none."""
    made = sum(tokens for _, tokens in t.turn_tokens[:turns])
    return int(np.flatnonzero(np.frombuffer(t.mask, np.uint8))[made - 1]) + 1 if made else 0


def samples(
    trajectories: list[Trajectory], segments: list[list[int]]
) -> list[tuple[Trajectory, int]]:
    """What is trained, and of which trajectory it is: a row for each leaf of the agent's histories
    (`Trajectory.samples`). With `segments` a turn that an earlier row has is context in the
    later."""
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
    """Its first `turns` turns with mask 0."""
    end = _end(t, turns)
    return msgspec.structs.replace(
        t,
        mask=bytes(end) + t.mask[end:],
        logprobs=bytes(4 * end) + t.logprobs[4 * end :],
        versions=pack_tokens([-1]) * end + t.versions[4 * end :],
        response_tokens=sum(t.mask[end:]),
        turn_tokens=t.turn_tokens[turns:],
    )
