"""A fast-forwarded model of a rollout engine with continuous batching (Orca, OSDI 2022; vLLM's
scheduler with chunked prefill).

In each engine step every decoding sequence generates one token, and the rest of
`max_batched_tokens` goes to prefill chunks, first come first served. A sequence is admitted while
fewer than `max_sequences` run and its context fits the KV cache, or while none runs. When the cache
is full, the newest sequence is preempted and recomputed later.

While no sequence is in prefill, the batch stays the same until a sequence ends, comes or goes, or
the cache is full. Such a run of decode steps is one event. Its duration has a closed form: D
sequences attend to D more tokens at each step, which adds c4 D seconds (`spec.StepTime`).

All times are work time: seconds of a device that this engine has to itself (see
`rose.parts.simulator.lending.Pace`).
"""

from __future__ import annotations

import math
from collections import deque
from heapq import heappop, heappush

from rose.parts.simulator import spec
from rose.parts.simulator.kv import KvCache

ROUNDING = 1e-9  # numerics: seconds by which two sums of the same times may differ
STEPS_ERROR = 1e-6  # numerics: error bound of the inverse of the closed form, in engine steps
NONE, WAITING, PREFILL, DECODE = 0, 1, 2, 3  # definition: states of a sequence


class Sequence:
    """An attempt at a turn. The prefix of the trajectory `key` stays cached between turns."""

    __slots__ = (
        "key",
        "group",
        "prompt",
        "context",
        "left",
        "attempt_tokens",
        "_state",
        "_todo",
        "_own",
        "_decode_start",
        "_admissions",
        "_order",
        "_level",
    )

    def __init__(self, key: str, group: str, prompt: int) -> None:
        self.key, self.group, self.prompt = key, group, prompt
        self.context = 0  # tokens before those that are still to be generated
        self.left = 0  # tokens still to be generated
        self.attempt_tokens = 0  # tokens generated; stale while it decodes (see `tokens_by`)
        self._state = NONE
        self._todo = 0  # tokens still to be prefilled
        self._own = 0  # tokens in the KV cache, without the group's prompt
        self._decode_start = 0  # the engine's count of decode steps when this sequence joined
        # Number of admissions. Heap entries of an earlier admission are void.
        self._admissions = 0
        self._order = 0  # serial number of its arrival in the engine
        self._level = 0  # index into the levels of rose.parts.simulator.drafts


class SimEngine:
    """A simulated engine. The caller must call `step` at the work time `due` (inf while idle).
    `now` is a work time in every method."""

    def __init__(self, config: spec.Engine) -> None:
        self._c = config.step
        self._floor = config.step.c0 + config.step.c5  # fixed seconds of a decode step
        self._max_sequences = config.max_sequences
        self._max_tokens = config.max_batched_tokens
        self.memory = KvCache(config.kv_tokens, config.prefix_caching)
        self.due = math.inf
        self.preemptions = 0
        self.prefilled = 0  # tokens
        self.decoded = 0  # tokens
        # Begin of the current run of steps with one batch, or end of the last run.
        self._at = 0.0
        self._steps = 0  # number of steps in the run
        self._chunks: list[tuple[Sequence, int]] = []  # (sequence, tokens) of a prefill step
        self._prefilled_at = 0.0  # end of the prefill step
        # Decode steps after the prefill step until the batch changes; `due` is their end.
        self._steps_after_prefill = 0
        self._decode_steps = 0  # decode steps done so far
        self._decodes = 0  # sequences that decode
        self._attended = 0  # tokens, sum of the contexts of the decoding sequences
        # heap of (decode step at which it ends, order, admission, sequence)
        self._ends: list[tuple[int, int, int, Sequence]] = []
        self._prefill: list[Sequence] = []
        self._waiting: deque[Sequence] = deque()
        self._order = 0

    @property
    def idle(self) -> bool:
        return self.due == math.inf

    @property
    def sequences(self) -> int:
        return self._decodes + len(self._prefill) + len(self._waiting)

    def running(self) -> list[Sequence]:
        """Return all sequences of the engine, in order of arrival."""
        found = [*self._decoding(), *self._prefill, *self._waiting]
        return sorted(found, key=lambda seq: seq._order)

    def add(self, now: float, seq: Sequence) -> None:
        """Queue a sequence with `context`, `left` and `attempt_tokens` set. The engine prefills the
        part of the context that is not cached, and generates `left` tokens."""
        self._order += 1
        seq._order, seq._state = self._order, WAITING
        self._waiting.append(seq)
        if self.due == math.inf:
            if now > self._at:
                self._at = now
            self._plan_run()
            return
        self._catch_up(now)
        if self._chunks:
            if now <= self._at + ROUNDING:
                self._plan_run()  # The step has not begun yet, so the sequence can join it.
            else:
                self.due, self._steps_after_prefill = self._prefilled_at, 0
        elif (steps := self._steps_until(now)) < self._steps:
            self._decode(steps)
            self._plan_run()

    def remove(self, now: float, seq: Sequence) -> None:
        """Remove the sequence. Afterwards `attempt_tokens` counts the tokens generated here."""
        self._stop_run(now)
        self._drop(seq)
        self._plan_run(now)

    def step(self) -> list[Sequence]:
        """Advance to `due` and return the sequences that end then."""
        self._catch_up(self.due)
        ended = self._prefill_done() if self._chunks else self._decode(self._steps)
        self._plan_run()
        return ended

    def pause(self, now: float, seconds: float, recompute: bool, clear: bool) -> None:
        """Pause for `seconds` after the current step. `clear` empties the prefix cache. `recompute`
        sends the running sequences back to the queue, to be prefilled again."""
        self._stop_run(now)
        self._at = max(self._at, now) + seconds
        if recompute:
            for seq in reversed(self.running()):
                if seq._state != WAITING:
                    self._back_to_queue(seq)
        if clear:
            self.memory.clear()
        self._plan_run(now)

    def set_kv(self, now: float, tokens: int) -> list[Sequence]:
        """Resize the KV cache. Remove and return the newest sequences that no longer fit."""
        memory = self.memory
        if tokens >= memory.capacity:
            memory.capacity = tokens
            if self._waiting:
                self._stop_run(now)
                self._plan_run(now)
            return []
        self._stop_run(now)
        memory.capacity = tokens
        gone = []
        for seq in reversed(self.running()):
            fits = (seq.context if seq._state == WAITING else memory.held) <= tokens
            if not fits:
                self._drop(seq)
                gone.append(seq)
        memory.fit()
        self._plan_run(now)
        return gone

    def tokens_by(self, now: float, seq: Sequence) -> int:
        """Return the number of tokens that this attempt has generated by `now`."""
        self._catch_up(now)
        if seq._state != DECODE:
            return seq.attempt_tokens
        done = 0 if self._chunks else self._steps_before(now)
        return seq.attempt_tokens + self._decode_steps - seq._decode_start + done

    def _plan_run(self, now: float = 0.0) -> None:
        """Plan the next run of steps, which begins at `_at` and does not end before `now`."""
        self._chunks, self._steps_after_prefill = [], 0
        if self._waiting:
            self._admit()
        if self._prefill:
            end = self._prefill_step()
        elif self._decodes:
            steps, room = self._steps_left(), int(self.memory.free // self._growth)
            if room < steps:
                if room <= 0 and self._decodes > 1:
                    self._preempt()
                    self._plan_run(now)
                    return
                # A sequence that is alone continues even if it outgrows the cache.
                steps = room if room > 0 else steps
            self._steps = steps
            end = self._at + self._seconds(steps, self._decodes, self._attended)
        else:
            end = math.inf
        self.due = end if end > now else now

    @property
    def _growth(self) -> float:
        """Tokens generated in a decode step, all sequences together."""
        return self._decodes

    def _steps_left(self) -> int:
        """Decode steps until the first sequence ends."""
        return self._first_end() - self._decode_steps

    def _decoding(self) -> list[Sequence]:
        return [
            seq
            for _, _, admission, seq in self._ends
            if seq._state == DECODE and seq._admissions == admission
        ]

    def _first_end(self) -> int:
        """The value of `_decode_steps` at which the first sequence ends."""
        ends = self._ends
        while ends[0][3]._admissions != ends[0][2] or ends[0][3]._state != DECODE:
            heappop(ends)
        return ends[0][0]

    def _prefill_step(self) -> float:
        """Choose the chunks of a prefill step. Decode steps follow it in the same run if the batch
        can't change after it. Return the end of the run."""
        c, decodes, chunks = self._c, self._decodes, self._chunks
        cost, left, context = self._choose_chunks(max(self._max_tokens - decodes, 1))
        end = (
            self._at
            + (cost if cost > c.c0 else c.c0)
            + c.c3 * decodes
            + c.c4 * self._attended
            + c.c5
        )
        self._steps, self._prefilled_at = 1, end
        if left < 2 or self._waiting or len(chunks) < len(self._prefill):
            return end
        steps = left - 1
        if decodes:
            steps = min(steps, self._first_end() - self._decode_steps - 1)
        decodes += len(chunks)
        if steps < 1 or (steps + 1) * decodes > self.memory.free:
            return end
        self._steps_after_prefill = steps
        return end + self._seconds(steps, decodes, self._attended + self._decodes + context)

    def _choose_chunks(self, budget: int) -> tuple[float, int, int]:
        """Choose chunks of at most `budget` tokens together. Return three numbers: seconds for the
        chunks alone; steps until the first of their sequences ends, or 0 if a prompt stays
        incomplete; and the sum of their contexts at the first decode step."""
        c, cost, left, context = self._c, 0.0, 1 << 60, 0
        for seq in self._prefill:
            todo = seq._todo
            chunk = todo if todo < budget else budget
            cost += chunk * (c.c1 + c.c2 * (seq.context - todo + chunk / 2))
            self._chunks.append((seq, chunk))
            budget -= chunk
            context += seq.context + 1
            if chunk < todo or seq.left < left:
                left = seq.left if chunk == todo else 0
            if budget <= 0:
                break
        return cost, left, context

    def _seconds(self, steps: int, decodes: int, attended: int) -> float:
        """Seconds of `steps` decode steps. The first attends to `attended` tokens."""
        c = self._c
        return steps * (
            self._floor + c.c3 * decodes + c.c4 * (attended + decodes * (steps - 1) * 0.5)
        )

    def _steps_in(self, seconds: float) -> float:
        """Number of decode steps (fractional) that fit into `seconds`.

        Each step is `growth` seconds longer than the last step. So the sum is quadratic in the
        number of steps, and this solves a quadratic equation.
        """
        c, decodes = self._c, self._decodes
        growth = c.c4 * decodes
        first = self._floor + c.c3 * decodes + c.c4 * self._attended - growth / 2
        return 2 * seconds / (first + math.sqrt(first * first + 2 * growth * seconds))

    def _steps_until(self, now: float) -> int:
        """Steps of the decode run until the first step boundary at or after `now`."""
        passed = now - self._at
        return math.ceil(self._steps_in(passed) - STEPS_ERROR) if passed > 0 else 0

    def _steps_before(self, now: float) -> int:
        """Steps of the decode run that have ended at `now`."""
        passed = now - self._at
        return min(int(self._steps_in(passed) + STEPS_ERROR), self._steps) if passed > 0 else 0

    def _decode(self, steps: int) -> list[Sequence]:
        """Advance by `steps` decode steps. Return the sequences that end with the last one."""
        self._at += self._seconds(steps, self._decodes, self._attended)
        self._decode_steps += steps
        generated = self._decodes * steps
        self._attended += generated
        self.memory.held += generated
        self.decoded += generated
        ended, ends = [], self._ends
        while ends and ends[0][0] <= self._decode_steps:
            _, _, admission, seq = heappop(ends)
            if seq._admissions == admission and seq._state == DECODE:
                self._leave_decode(seq)
                self._release(seq)
                ended.append(seq)
        self.memory.fit()
        return ended

    def _prefill_done(self) -> list[Sequence]:
        """End the prefill step: every decoding sequence, and every sequence whose prefill is
        complete, has generated a token. Return the sequences that end."""
        chunks, self._chunks = self._chunks, []
        joined = []
        for seq, chunk in chunks:
            seq._todo -= chunk
            self.prefilled += chunk
            if seq._todo <= 0:
                joined.append(seq)
        if joined:
            # Chunks are chosen first come first served, so that only the last can be partial.
            self._prefill = self._prefill[len(joined) :]
        ended = []
        if self._decodes:
            ended = self._decode(1)
        for seq in joined:
            self._join(seq, ended)
        self._at = self._prefilled_at
        return ended

    def _join(self, seq: Sequence, ended: list[Sequence]) -> None:
        """Count the first token of a prefilled sequence, and let it decode its other tokens."""
        seq.attempt_tokens += 1
        seq._own += 1
        self.memory.held += 1
        self.decoded += 1
        if seq.left <= 1:
            seq.left = 0
            self._release(seq)
            ended.append(seq)
            return
        seq._state = DECODE
        seq.left -= 1
        seq.context += 1
        self._decodes += 1
        self._attended += seq.context
        self._note_end(seq)

    def _note_end(self, seq: Sequence) -> None:
        """Note at which decode step the sequence ends."""
        seq._decode_start = self._decode_steps
        heappush(self._ends, (self._decode_steps + seq.left, seq._order, seq._admissions, seq))

    def _leave_decode(self, seq: Sequence) -> None:
        """Remove the sequence from the decode batch and bring its token counts up to date."""
        generated = self._decode_steps - seq._decode_start
        seq.attempt_tokens += generated
        seq.left -= generated
        seq.context += generated
        seq._own += generated
        self._decodes -= 1
        self._attended -= seq.context

    def _catch_up(self, now: float) -> None:
        """End the prefill step if `now` lies in the decode steps that follow it."""
        if self._steps_after_prefill and now >= self._prefilled_at:
            self._steps, self._steps_after_prefill = self._steps_after_prefill, 0
            self._prefill_done()

    def _stop_run(self, now: float) -> None:
        """Advance to the first step boundary at or after `now`. Leave the last step of the run,
        since only `step` may end sequences. The caller must call `_plan_run` afterwards."""
        self._catch_up(now)
        if self.due < math.inf and not self._chunks:
            self._decode(min(self._steps_until(now), self._steps - 1))
        elif self.due == math.inf and now > self._at:
            self._at = now

    def _admit(self) -> None:
        """Admit waiting sequences, first come first served, while they fit or none runs."""
        waiting = self._waiting
        while waiting and self._decodes + len(self._prefill) < self._max_sequences:
            seq = waiting[0]
            alone = not self._decodes and not self._prefill
            if not alone and not self.memory.has_room(seq.group, seq.prompt, seq.context):
                return
            waiting.popleft()
            seq._admissions += 1
            seq._state = PREFILL
            seq._own, seq._todo = self.memory.allocate(seq.key, seq.group, seq.prompt, seq.context)
            self._prefill.append(seq)

    def _release(self, seq: Sequence) -> None:
        """Free the memory of a sequence that stops."""
        seq._state = NONE
        self.memory.release(seq.key, seq.group, seq._own, seq._todo)

    def _drop(self, seq: Sequence) -> None:
        """Remove the sequence from the queue, from prefill or from the decode batch."""
        if seq._state == WAITING:
            self._waiting.remove(seq)
            seq._state = NONE
        elif seq._state == PREFILL:
            self._prefill.remove(seq)
            self._release(seq)
        elif seq._state == DECODE:
            self._leave_decode(seq)
            self._release(seq)

    def _back_to_queue(self, seq: Sequence) -> None:
        """Move the sequence to the head of the queue. Its tokens so far become context, of which
        the part that is no longer cached is prefilled again."""
        self._drop(seq)
        seq._state = WAITING
        self._waiting.appendleft(seq)

    def _preempt(self) -> None:
        """Preempt the newest decoding sequence. As in vLLM, its blocks stay cached for now."""
        newest = max(self._decoding(), key=lambda seq: seq._order)
        self.preemptions += 1
        self._back_to_queue(newest)
