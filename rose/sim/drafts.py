"""An engine that drafts tokens ahead, from its requests' own texts and those of their siblings that
have ended (live: rose/engine/drafts).

Requests with as many ended siblings are alike, and advance by the mean of what a recorded run had
accepted (`spec.Drafts`), so that runs of like steps are fast-forwarded here, too. A drafted token
costs a step what a decode does, by the rule of rose/lending/rules/predictor.py, or its matrix
products where these are longer than the step; each request costs a lookup besides. What is drafted
follows the engines' own rule (`rose.engine.drafts.gain.fastest`) at each change of the batch, on
the step times that the simulator knows and a live engine fits.

Left out: how requests of one step differ, KV of drafted tokens, probes of the gate, what an engine
with a proposer pays while nothing is drafted (docs/drafts.md), and what
siblings that still run have said, which helps little more than none (replayed tool calls of 16 in
lockstep: 1.83 tokens a step; 1.81 after none has ended).
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from heapq import heappop, heappush

import numpy as np

from rose.engine.drafts import gain
from rose.sim import spec
from rose.sim.engine import DECODE, PART, Sequence, SimEngine


class Ended:
    """How many trajectories of each group have ended, for all engines of a run."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def add(self, group: str) -> None:
        self._counts[group] += 1

    def drop(self, group: str) -> None:
        self._counts.pop(group, None)

    def of(self, group: str) -> int:
        return self._counts[group]


class _Level:
    """Decoding sequences with as many ended siblings."""

    def __init__(self) -> None:
        self.count = 0
        self.done = 0.0  # tokens that one of them has made since the engine began
        self.rate = 1.0  # tokens of one in a step
        # (`done` at its end, order, run, it)
        self.ends: list[tuple[float, int, int, Sequence]] = []


class DraftingEngine(SimEngine):
    def __init__(self, config: spec.Engine, ended: Ended) -> None:
        """`config.drafts` is there."""
        super().__init__(config)
        self._drafts, self._siblings = config.drafts, ended
        self._levels = [_Level() for _ in self._drafts.siblings]
        self._drafted = 0.0  # tokens of a step
        self._rise = 0.0  # tokens that a step makes
        self._flat = 0.0  # seconds of a step without prefill, its attention aside

    def look(self, now: float, seq: Sequence) -> int:
        self._catch_up(now)
        if seq._state != DECODE:
            return seq.made
        level, done = self._levels[seq._level], 0 if self._chunks else self._steps_before(now)
        return seq.made + self._whole(seq, level.done + done * level.rate - seq._from)

    def sibling_ended(self, now: float, group: str) -> bool:
        """One more of this group has; whether that changes anything."""
        level = self._level_of(group)
        moves = [s for s in self._decoding() if s.group == group and s._level != level]
        if not moves:
            return False
        self._halt(now)
        for seq in moves:
            old = self._levels[seq._level]
            old.count -= 1
            self._enter(seq, level, old.done - seq._from)
        self._begin(now)
        return True

    # ----------------------------------------------------------------- what is drafted

    def _decide(self) -> None:
        """For the steps to come."""
        c, drafts, decodes = self._c, self._drafts, self._decodes
        best, counts = None, np.array([level.count for level in self._levels])
        if decodes:
            attention = c.c4 * self._attended
            drafted = counts @ drafts.drafted  # (ways,)
            tokens = decodes + counts @ drafts.accepted
            best = len(drafted) - 1
            if drafts.adaptive:
                without = decodes / (self._flat_of(0.0, 0.0) + attention)
                best = gain.fastest(tokens, self._flat_of(drafted, 0.0) + attention, without)
        self._drafted = 0.0 if best is None else float(drafted[best])
        self._flat = float(self._flat_of(self._drafted, 0.0))
        for at, level in enumerate(self._levels):
            level.rate = 1.0 if best is None else 1.0 + float(drafts.accepted[at, best])
        self._rise = sum(level.count * level.rate for level in self._levels)

    def _flat_of(self, drafted: float | np.ndarray, prefill_s: float) -> float | np.ndarray:
        """Seconds of a step of all decodes, attention aside."""
        c, decodes = self._c, self._decodes
        computed = decodes + drafted
        flat = max(c.c0, prefill_s) + c.c5 + c.c3 * computed
        drafting = np.maximum(flat, prefill_s + c.c5 + c.c1 * computed)
        return np.where(drafted, drafting + self._drafts.lookup_s * decodes, flat)

    def _prefill_step(self) -> float:
        """Chunks get what decodes and drafts leave of the step's tokens. What is drafted doesn't
        depend on them: it is decided before a step is put together."""
        self._decide()
        budget = int(self._max_tokens - self._decodes - self._drafted)
        cost, _, _ = self._choose(max(budget, 1))
        flat = float(self._flat_of(self._drafted, cost))
        self._steps, self._prefilled_at = 1, self._at + flat + self._c.c4 * self._attended
        return self._prefilled_at

    # ----------------------------------------------------------------- runs of like steps

    @property
    def _growth(self) -> float:
        return self._rise

    def _steps_left(self) -> int:
        self._decide()
        steps = math.inf
        for at, level in enumerate(self._levels):
            while level.ends and not self._current(at, level.ends[0]):
                heappop(level.ends)
            if level.ends:
                steps = min(steps, math.ceil((level.ends[0][0] - level.done) / level.rate - PART))
        return max(1, int(steps))

    def _seconds(self, steps: int, decodes: int, attended: float) -> float:
        return steps * (self._flat + self._c.c4 * (attended + self._rise * (steps - 1) * 0.5))

    def _solve(self, seconds: float) -> float:
        growth = self._c.c4 * self._rise
        first = self._flat + self._c.c4 * self._attended - growth / 2
        return 2 * seconds / (first + math.sqrt(first * first + 2 * growth * seconds))

    def _decode(self, steps: int) -> list[Sequence]:
        self._at += self._seconds(steps, self._decodes, self._attended)
        made = self._rise * steps
        self._attended += made
        self._held += made
        self.decoded += made
        ended: list[Sequence] = []
        for at, level in enumerate(self._levels):
            level.done += steps * level.rate
            while level.ends and level.ends[0][0] <= level.done + PART:
                entry = heappop(level.ends)
                if self._current(at, entry):
                    ended.append(entry[3])
        ended.sort(key=lambda seq: seq._order)
        for seq in ended:
            self._leave(seq, seq.left)
            self._release(seq)
        if self._held + self._cached > self.kv:
            self._fit()
        return ended

    def _note_end(self, seq: Sequence) -> None:
        self._enter(seq, self._level_of(seq.group), 0.0)

    def _enter(self, seq: Sequence, at: int, progress: float) -> None:
        """`progress`: tokens made since it decodes."""
        level = self._levels[at]
        level.count += 1
        seq._level, seq._from = at, level.done - progress
        heappush(level.ends, (seq._from + seq.left, seq._order, seq._run, seq))

    def _leave_decode(self, seq: Sequence) -> None:
        self._leave(seq, self._whole(seq, self._levels[seq._level].done - seq._from))

    def _leave(self, seq: Sequence, made: int) -> None:
        """With so many tokens; what is counted of it beyond them never was."""
        level = self._levels[seq._level]
        beyond = level.done - seq._from - made
        level.count -= 1
        seq.made += made
        seq.left -= made
        seq.context += made
        seq._own += made
        self._decodes -= 1
        self._attended -= seq.context + beyond
        self._held -= beyond
        self.decoded -= beyond

    @staticmethod
    def _whole(seq: Sequence, progress: float) -> int:
        """Tokens of one that has not ended."""
        return min(int(progress + PART), seq.left - 1)

    def _decoding(self) -> list[Sequence]:
        return [
            entry[3]
            for at, level in enumerate(self._levels)
            for entry in level.ends
            if self._current(at, entry)
        ]

    @staticmethod
    def _current(at: int, entry: tuple[float, int, int, Sequence]) -> bool:
        _, _, run, seq = entry
        return seq._state == DECODE and seq._run == run and seq._level == at

    def _level_of(self, group: str) -> int:
        return bisect_right(self._drafts.siblings, self._siblings.of(group)) - 1
