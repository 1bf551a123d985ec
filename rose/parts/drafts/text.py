"""The text of one group's trajectories, in which drafts are looked up: about 28 bytes a token."""

from __future__ import annotations

import numpy as np

from rose.parts.drafts import loops

FIRST = 2048  # nodes that a new text has room for
# Number of last tokens that are compared to decide whether a turn continues the turn before.
CHECKED = 8
# Chances of acceptance before any trial, one row per level (`loops.LEVELS`), one column per
# agreement (`loops.kind_of`). They count as `PRIOR_TRIALS` trials, so that a few drafts correct
# them.
PRIOR = (
    (0.35, 0.50, 0.70, 0.60, 0.50, 0.35, 0.25, 0.10),
    (0.55, 0.70, 0.85, 0.75, 0.60, 0.45, 0.30, 0.15),
    (0.75, 0.85, 0.92, 0.85, 0.70, 0.50, 0.30, 0.15),
    (0.85, 0.92, 0.96, 0.90, 0.75, 0.50, 0.30, 0.15),
)
PRIOR_TRIALS = 4.0


def acceptance(prior: bool) -> np.ndarray:
    """Return a table (kinds, 2) of accepted and tried tokens: `PRIOR` if `prior`, else zeros."""
    table = np.zeros((len(loops.LEVELS) * loops.SHARES, 2))
    if prior:
        table[:, 0] = np.ravel(PRIOR) * PRIOR_TRIALS
        table[:, 1] = PRIOR_TRIALS
    return table


class Text:
    """A group's texts as one tree, which several writers extend. A writer keeps the number of the
    node that it wrote last, -1 before its first."""

    def __init__(self) -> None:
        self.accepted = acceptance(prior=False)
        self._used = 0
        self._nodes = np.empty((loops.ROWS, FIRST), np.int32)
        self._heads = np.full((2, FIRST), -1, np.int32)

    def __len__(self) -> int:
        return self._used

    @property
    def nbytes(self) -> int:
        return self._nodes.nbytes + self._heads.nbytes

    def begin(self, tokens: np.ndarray) -> int:
        """Write the whole context `tokens` of a trajectory; return the last node. A beginning in
        common with the group's first text, which is the prompt, is not written again."""
        shared = loops.follow(self._nodes, self._used, tokens)
        return self.extend(shared - 1, tokens[shared:])

    def extend(self, tail: int, tokens: np.ndarray) -> int:
        """Write `tokens` (n,) int32 after node `tail`; return the last node."""
        self._grow(len(tokens))
        tail = loops.extend(self._nodes, self._heads, self._used, tail, tokens)
        self._used += len(tokens)
        return tail

    def ends_with(self, tail: int, tokens: np.ndarray) -> bool:
        """Return True if the text up to node `tail` ends with the last `CHECKED` of `tokens`."""
        return loops.ends_with(self._nodes, tail, tokens[-CHECKED:])

    def draft(
        self, tail: int, most: int, overall: np.ndarray, path: np.ndarray, chances: np.ndarray
    ) -> int:
        """Look up a draft: see `loops.look_up`."""
        return loops.look_up(
            self._nodes, self._heads, tail, most, overall, self.accepted, path, chances
        )

    def learn(self, path: np.ndarray, count: int, sampled: np.ndarray, overall: np.ndarray) -> None:
        """Compare a draft with sampled tokens: see `loops.learn`."""
        loops.learn(path, count, sampled, overall, self.accepted)

    def _grow(self, more: int) -> None:
        room = self._nodes.shape[1]
        if self._used + more <= room:
            return
        while room < self._used + more:
            room *= 2
        nodes = np.empty((loops.ROWS, room), np.int32)
        nodes[:, : self._used] = self._nodes[:, : self._used]
        heads = np.full((2, room), -1, np.int32)
        loops.rebuild(nodes, heads, self._used)
        self._nodes, self._heads = nodes, heads
