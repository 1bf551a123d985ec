"""Which turns the trajectories of a batch have in common, where they fork off each other.

No torch: the coordinator finds the segments, algorithms of trees read them. A segment is the turns
that the same trajectories share, so a tree of rollouts is nested segments. What an algorithm of
trees trains of a segment stands in the first of its rows alone, each token once; every other
algorithm takes the trajectories whole, as if each had begun with the prompt.
"""

from __future__ import annotations

from collections import defaultdict

import msgspec
import numpy as np

from rose.protocol import Trajectory, pack_tokens


def find(trajectories: list[Trajectory]) -> list[list[int]]:
    """(N,): of each turn, the number of its segment; [] if no trajectory forked off another."""
    if not any(t.inherited for t in trajectories):
        return []
    sharing: dict[tuple[str, str, int], list[int]] = defaultdict(list)  # a turn -> its rows
    for row, t in enumerate(trajectories):
        for turn, maker in enumerate(t.makers):
            sharing[t.group, maker, turn].append(row)
    numbers: dict[tuple[int, ...], int] = {}
    return [
        [
            numbers.setdefault(tuple(sharing[t.group, maker, turn]), len(numbers))
            for turn, maker in enumerate(t.makers)
        ]
        for t in trajectories
    ]


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
        found.append((_without(t, shared), row))
    return found


def _without(t: Trajectory, turns: int) -> Trajectory:
    """Its first `turns` turns with mask 0."""
    made = sum(tokens for _, tokens in t.turn_tokens[:turns])
    if not made:
        return t
    end = int(np.flatnonzero(np.frombuffer(t.mask, np.uint8))[made - 1]) + 1
    return msgspec.structs.replace(
        t,
        mask=bytes(end) + t.mask[end:],
        logprobs=bytes(4 * end) + t.logprobs[4 * end :],
        versions=pack_tokens([-1]) * end + t.versions[4 * end :],
        response_tokens=t.response_tokens - made,
        turn_tokens=t.turn_tokens[turns:],
    )
