"""A model of an engine that drafts tokens from the text of its requests and of their ended siblings
(live: rose/parts/drafts).

All requests of one level, a range of numbers of ended siblings, advance by the same mean number of
tokens a step, measured in a recorded run (`spec.Drafts`). So runs of equal steps are
fast-forwarded, as in `SimEngine`. A drafted token costs as much as a decode
(rose/parts/lending/rules/predictor.py). A step takes at least as long as the matrix products of all
its tokens. Each request also costs a lookup. At each change of the batch the live engine's rule
(`rose.parts.drafts.gain.fastest`) chooses the number of drafted tokens, but from the true step
times instead of fitted ones.

The model leaves out:
- differences between the requests of one step, the KV of drafted tokens, and the gate's probes;
- the cost of a proposer while nothing is drafted (docs/drafts.md);
- the text of siblings that still run, which hardly helps: tool calls of 16 siblings, replayed in
  lockstep, got 1.83 tokens a step with this text and 1.81 without.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from heapq import heappop, heappush

import numpy as np

from rose.parts.drafts import gain
from rose.parts.simulator import spec
from rose.parts.simulator.engine import DECODE, STEPS_ERROR, Sequence, SimEngine


class Ended:
    """Number of ended trajectories per group, shared by all engines of a run."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def add(self, group: str) -> None:
        self._counts[group] += 1

    def drop(self, group: str) -> None:
        self._counts.pop(group, None)

    def count(self, group: str) -> int:
        return self._counts[group]


class _Level:
    """The decoding sequences whose groups have about the same number of ended siblings: one level
    of `spec.Drafts.siblings`."""

    def __init__(self) -> None:
        self.count = 0  # sequences
        # Tokens that a sequence would have generated if it had been at this level from the start.
        self.done = 0.0
        self.rate = 1.0  # tokens per sequence and step
        # heap of (`done` at which it ends, order, admission, sequence)
        self.ends: list[tuple[float, int, int, Sequence]] = []


class DraftingEngine(SimEngine):
    """A `SimEngine` that drafts tokens. `config.drafts` must not be None. `SimEngine` documents the
    methods that have no docstring here."""

    def __init__(self, config: spec.Engine, ended: Ended) -> None:
        super().__init__(config)
        self._drafts, self._siblings = config.drafts, ended
        self._levels = [_Level() for _ in self._drafts.siblings]
        self._drafted = 0.0  # tokens drafted per step
        self._generated = 0.0  # tokens generated per step, all sequences together
        self._flat = 0.0  # seconds of a step without prefill and without attention

    def tokens_by(self, now: float, seq: Sequence) -> int:
        """See `SimEngine.tokens_by`. The steps that have ended of this run of decode steps count
        with the level's mean rate, rounded down to whole tokens."""
        self._catch_up(now)
        if seq._state != DECODE:
            return seq.attempt_tokens
        level, steps = self._levels[seq._level], 0 if self._chunks else self._steps_before(now)
        return seq.attempt_tokens + self._whole_tokens(
            seq, level.done + steps * level.rate - seq._decode_start
        )

    def sibling_ended(self, now: float, group: str) -> bool:
        """Move the group's decoding sequences to the level of its current number of ended siblings.
        Return whether any moved."""
        level = self._level_of(group)
        moves = [s for s in self._decoding() if s.group == group and s._level != level]
        if not moves:
            return False
        self._stop_run(now)
        for seq in moves:
            old = self._levels[seq._level]
            old.count -= 1
            self._enter(seq, level, old.done - seq._decode_start)
        self._plan_run(now)
        return True

    def _decide(self) -> None:
        """Choose how many tokens the next steps draft. Set the rate of each level and the seconds
        of a step."""
        c, drafts, decodes = self._c, self._drafts, self._decodes
        best, counts = None, np.array([level.count for level in self._levels])
        if decodes:
            attention = c.c4 * self._attended
            drafted = counts @ drafts.drafted  # (ways,), see `spec.Drafts`
            tokens = decodes + counts @ drafts.accepted
            best = len(drafted) - 1
            if drafts.adaptive:
                without = decodes / (self._flat_of(0.0, 0.0) + attention)
                best = gain.fastest(tokens, self._flat_of(drafted, 0.0) + attention, without)
        self._drafted = 0.0 if best is None else float(drafted[best])
        self._flat = float(self._flat_of(self._drafted, 0.0))
        for at, level in enumerate(self._levels):
            level.rate = 1.0 if best is None else 1.0 + float(drafts.accepted[at, best])
        self._generated = sum(level.count * level.rate for level in self._levels)

    def _flat_of(self, drafted: float | np.ndarray, prefill_s: float) -> float | np.ndarray:
        """Return the seconds of a step without attention: all decodes, `drafted` tokens, and
        prefill chunks of `prefill_s`."""
        c, decodes = self._c, self._decodes
        computed = decodes + drafted
        flat = max(c.c0, prefill_s) + c.c5 + c.c3 * computed
        drafting = np.maximum(flat, prefill_s + c.c5 + c.c1 * computed)
        return np.where(drafted, drafting + self._drafts.lookup_s * decodes, flat)

    def _prefill_step(self) -> float:
        """Choose the chunks of a prefill step and return its end.

        The live engine decides on drafts before it composes a step, so drafts don't depend on the
        chunks. Decodes and drafts take their part of the token budget first.
        """
        self._decide()
        budget = int(self._max_tokens - self._decodes - self._drafted)
        cost, _, _ = self._choose_chunks(max(budget, 1))
        flat = float(self._flat_of(self._drafted, cost))
        self._steps, self._prefilled_at = 1, self._at + flat + self._c.c4 * self._attended
        return self._prefilled_at

    @property
    def _growth(self) -> float:
        return self._generated

    def _steps_left(self) -> int:
        self._decide()
        steps = math.inf
        for at, level in enumerate(self._levels):
            while level.ends and not self._is_current(at, level.ends[0]):
                heappop(level.ends)
            if level.ends:
                left = level.ends[0][0] - level.done
                steps = min(steps, math.ceil(left / level.rate - STEPS_ERROR))
        return max(1, int(steps))

    def _seconds(self, steps: int, decodes: int, attended: float) -> float:
        return steps * (self._flat + self._c.c4 * (attended + self._generated * (steps - 1) * 0.5))

    def _steps_in(self, seconds: float) -> float:
        growth = self._c.c4 * self._generated
        first = self._flat + self._c.c4 * self._attended - growth / 2
        return 2 * seconds / (first + math.sqrt(first * first + 2 * growth * seconds))

    def _decode(self, steps: int) -> list[Sequence]:
        self._at += self._seconds(steps, self._decodes, self._attended)
        generated = self._generated * steps
        self._attended += generated
        self.memory.held += generated
        self.decoded += generated
        ended: list[Sequence] = []
        for at, level in enumerate(self._levels):
            level.done += steps * level.rate
            while level.ends and level.ends[0][0] <= level.done + STEPS_ERROR:
                entry = heappop(level.ends)
                if self._is_current(at, entry):
                    ended.append(entry[3])
        ended.sort(key=lambda seq: seq._order)
        for seq in ended:
            self._leave(seq, seq.left)
            self._release(seq)
        self.memory.fit()
        return ended

    def _note_end(self, seq: Sequence) -> None:
        self._enter(seq, self._level_of(seq.group), 0.0)

    def _enter(self, seq: Sequence, at: int, progress: float) -> None:
        """Add the sequence to level `at`. It has decoded `progress` tokens so far."""
        level = self._levels[at]
        level.count += 1
        seq._level, seq._decode_start = at, level.done - progress
        heappush(level.ends, (seq._decode_start + seq.left, seq._order, seq._admissions, seq))

    def _leave_decode(self, seq: Sequence) -> None:
        self._leave(seq, self._whole_tokens(seq, self._levels[seq._level].done - seq._decode_start))

    def _leave(self, seq: Sequence, generated: int) -> None:
        """Remove the sequence from the batch after `generated` tokens. Subtract from the engine's
        sums the tokens that its level has counted beyond these."""
        level = self._levels[seq._level]
        beyond = level.done - seq._decode_start - generated
        level.count -= 1
        seq.attempt_tokens += generated
        seq.left -= generated
        seq.context += generated
        seq._own += generated
        self._decodes -= 1
        self._attended -= seq.context + beyond
        self.memory.held -= beyond
        self.decoded -= beyond

    @staticmethod
    def _whole_tokens(seq: Sequence, progress: float) -> int:
        """Round `progress` down to whole tokens. A sequence that has not ended has a token left."""
        return min(int(progress + STEPS_ERROR), seq.left - 1)

    def _decoding(self) -> list[Sequence]:
        return [
            entry[3]
            for at, level in enumerate(self._levels)
            for entry in level.ends
            if self._is_current(at, entry)
        ]

    @staticmethod
    def _is_current(at: int, entry: tuple[float, int, int, Sequence]) -> bool:
        """Return whether a heap entry of level `at` is valid: its sequence still decodes there, in
        the same admission."""
        _, _, admission, seq = entry
        return seq._state == DECODE and seq._admissions == admission and seq._level == at

    def _level_of(self, group: str) -> int:
        return bisect_right(self._drafts.siblings, self._siblings.count(group)) - 1
