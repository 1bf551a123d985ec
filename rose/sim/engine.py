"""One rollout engine with continuous batching (Orca, OSDI 2022; vLLM's scheduler with chunked
prefill), fast-forwarded.

Each step, every decoding sequence makes one token and the rest of `max_batched_tokens` goes to
prefill chunks, first come first served. A sequence is admitted while there are fewer than
`max_sequences` and its context fits the KV cache; when the cache is full the newest is preempted
and recomputed later. While nobody is in prefill the batch changes only when the first sequence
ends, so one event stands for all these steps: T grows with the context by c4 D each, and the sum is
a closed form. Prefix caching is counted in tokens, not blocks. What an attempt leaves, ended or
not, is evicted from its end on when it is the least recently used, as vLLM frees a request's last
blocks first; a group's prompt is held once.

Time here is work time: seconds of a device that is all the engine's (see `rose.sim.lending.Pace`).
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from heapq import heappop, heappush

from rose.sim import spec

# of the cache, left free when a sequence is admitted beside others
WATERMARK = 0.01  # ours: vLLM 0.32 leaves none by default, and preempts what it has just admitted
ROUNDING = 1e-9  # numerics: seconds by which two sums of the same times may differ
PART = 1e-6  # numerics: of a step, by which the inverse of the closed form may be off
NONE, WAITING, PREFILL, DECODE = 0, 1, 2, 3  # definition: states of a sequence


class Sequence:
    """One turn's attempt as the engine sees it. `key` names the trajectory, whose prefix is cached
    between turns."""

    __slots__ = (
        "key",
        "group",
        "prompt",
        "context",
        "left",
        "made",
        "_state",
        "_todo",
        "_own",
        "_from",
        "_run",
        "_order",
        "_level",
    )

    def __init__(self, key: str, group: str, prompt: int) -> None:
        self.key, self.group, self.prompt = key, group, prompt
        self.context = 0  # tokens before what is made now
        self.left = 0  # tokens to make
        self.made = 0  # tokens, of this attempt; up to date after the engine was asked for it
        self._state = NONE
        self._todo = 0  # tokens of prefill
        self._own = 0  # tokens of KV cache, the group's prompt aside
        self._from = 0  # decode steps that the engine had done when it joined them
        self._run = 0  # admissions so far: what the engine noted of an earlier one is void
        self._order = 0  # of arrival
        self._level = 0  # of drafts (rose.sim.drafts)


class SimEngine:
    """`due`: work time of the next change, inf when idle; then call `step`. Every method takes the
    work time."""

    def __init__(self, config: spec.Engine) -> None:
        self._c = config.step
        self._floor = config.step.c0 + config.step.c5  # of a step without prefill
        self._max_sequences, self._max_tokens, self._caches = (
            config.max_sequences,
            config.max_batched_tokens,
            config.prefix_caching,
        )
        self.kv = config.kv_tokens
        self.due = math.inf
        self.preemptions = 0
        self.prefilled = 0  # tokens
        self.decoded = 0
        self._at = (
            0.0  # begin of the run of like steps that is under way, or the end of the last one
        )
        self._steps = 0  # of the run
        self._chunks: list[tuple[Sequence, int]] = []  # of a prefill step
        self._prefilled_at = 0.0  # its end
        # decode steps that follow it before anything changes: `due` is their end, if there are any
        self._then = 0
        self._n = 0  # decode steps done
        self._decodes = 0
        self._attended = 0  # sum of their contexts
        self._ends: list[
            tuple[int, int, int, Sequence]
        ] = []  # (step at which it ends, order, its run, it)
        self._prefill: list[Sequence] = []
        self._waiting: deque[Sequence] = deque()
        self._held = 0  # tokens of KV in use
        self._cached = 0  # tokens of KV that may be evicted
        # trajectory -> (own tokens, group)
        self._cache: OrderedDict[str, tuple[int, str]] = OrderedDict()
        self._prompts: dict[str, list[int]] = {}  # group -> [tokens, users]
        self._order = 0

    @property
    def idle(self) -> bool:
        return self.due == math.inf

    @property
    def sequences(self) -> int:
        return self._decodes + len(self._prefill) + len(self._waiting)

    def running(self) -> list[Sequence]:
        """All it has, in order of arrival."""
        found = [*self._decoding(), *self._prefill, *self._waiting]
        return sorted(found, key=lambda seq: seq._order)

    # ----------------------------------------------------------------- what comes and goes

    def add(self, now: float, seq: Sequence) -> None:
        """`context`, `left` and `made` are set: it is prefilled, but for what is cached, and makes
        `left` tokens."""
        self._order += 1
        seq._order, seq._state = self._order, WAITING
        self._waiting.append(seq)
        if self.due == math.inf:
            if now > self._at:
                self._at = now
            self._begin()
            return
        self._catch_up(now)
        if self._chunks:
            if now <= self._at + ROUNDING:
                self._begin()  # the step has not begun yet: it can join
            else:
                self.due, self._then = self._prefilled_at, 0
        elif (steps := self._steps_until(now)) < self._steps:
            self._decode(steps)
            self._begin()

    def remove(self, now: float, seq: Sequence) -> None:
        """It is wanted no more, or goes elsewhere; `made` says what it has."""
        self._halt(now)
        self._drop(seq)
        self._begin(now)

    def step(self) -> list[Sequence]:
        """At `due`: the sequences that end then."""
        self._catch_up(self.due)
        ended = self._prefill_done() if self._chunks else self._decode(self._steps)
        self._begin()
        return ended

    def pause(self, now: float, seconds: float, recompute: bool, clear: bool) -> None:
        """The engine stands still after the step under way. `clear`: nothing is cached any more;
        `recompute`: neither is what runs, which is prefilled anew."""
        self._halt(now)
        self._at = max(self._at, now) + seconds
        if recompute:
            for seq in reversed(self.running()):
                if seq._state != WAITING:
                    self._back_to_queue(seq)
        if clear:
            while self._cache:
                self._evict(self._cached)
        self._begin(now)

    def set_kv(self, now: float, tokens: int) -> list[Sequence]:
        """The cache has another size now; the newest sequences that it has no room for any more are
        given back."""
        if tokens >= self.kv:
            self.kv = tokens
            if self._waiting:
                self._halt(now)
                self._begin(now)
            return []
        self._halt(now)
        self.kv = tokens
        gone = []
        for seq in reversed(self.running()):
            if (
                self._held <= tokens
                and seq._state != WAITING
                or seq._state == WAITING
                and seq.context <= tokens
            ):
                continue
            self._drop(seq)
            gone.append(seq)
        self._fit()
        self._begin(now)
        return gone

    def look(self, now: float, seq: Sequence) -> int:
        """Tokens made of it by now."""
        self._catch_up(now)
        if seq._state != DECODE:
            return seq.made
        done = 0 if self._chunks else self._steps_before(now)
        return seq.made + self._n - seq._from + done

    # ----------------------------------------------------------------- runs of like steps

    def _begin(self, now: float = 0.0) -> None:
        """Plan the next run of steps, from `_at` on; it does not end before `now`."""
        self._chunks, self._then = [], 0
        if self._waiting:
            self._admit()
        if self._prefill:
            end = self._prefill_step()
        elif self._decodes:
            steps, room = self._steps_left(), int((self.kv - self._held) // self._growth)
            if room < steps:
                if room <= 0 and self._decodes > 1:
                    self._preempt()
                    self._begin(now)
                    return
                steps = room if room > 0 else steps  # one alone goes on, however large
            self._steps = steps
            end = self._at + self._seconds(steps, self._decodes, self._attended)
        else:
            end = math.inf
        self.due = end if end > now else now

    @property
    def _growth(self) -> float:
        """Tokens that a decode step makes."""
        return self._decodes

    def _steps_left(self) -> int:
        """Of decode, until the first sequence ends."""
        return self._first_end() - self._n

    def _decoding(self) -> list[Sequence]:
        return [seq for _, _, run, seq in self._ends if seq._state == DECODE and seq._run == run]

    def _first_end(self) -> int:
        """The count of decode steps at which the first sequence ends."""
        ends = self._ends
        while ends[0][3]._run != ends[0][2] or ends[0][3]._state != DECODE:
            heappop(ends)
        return ends[0][0]

    def _prefill_step(self) -> float:
        """Choose its chunks; the end of it, or of the decode steps behind it if nothing else can
        come between."""
        c, decodes, chunks = self._c, self._decodes, self._chunks
        cost, left, context = self._choose(max(self._max_tokens - decodes, 1))
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
            steps = min(steps, self._first_end() - self._n - 1)
        decodes += len(chunks)
        if steps < 1 or (steps + 1) * decodes > self.kv - self._held:
            return end
        self._then = steps
        return end + self._seconds(steps, decodes, self._attended + self._decodes + context)

    def _choose(self, budget: int) -> tuple[float, int, int]:
        """Chunks of so many tokens at most: seconds of them alone, steps until the first of these
        sequences ends (0: one is not all in), and the tokens that they attend to then."""
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
        """Of so many decode steps, the first of which attends to so many tokens."""
        c = self._c
        return steps * (
            self._floor + c.c3 * decodes + c.c4 * (attended + decodes * (steps - 1) * 0.5)
        )

    def _solve(self, seconds: float) -> float:
        """Steps, not whole, that take so long."""
        c, decodes = self._c, self._decodes
        growth = c.c4 * decodes
        first = self._floor + c.c3 * decodes + c.c4 * self._attended - growth / 2
        return 2 * seconds / (first + math.sqrt(first * first + 2 * growth * seconds))

    def _steps_until(self, now: float) -> int:
        """Steps of the decode run until the first boundary that is not before `now`."""
        passed = now - self._at
        return math.ceil(self._solve(passed) - PART) if passed > 0 else 0

    def _steps_before(self, now: float) -> int:
        passed = now - self._at
        return min(int(self._solve(passed) + PART), self._steps) if passed > 0 else 0

    def _decode(self, steps: int) -> list[Sequence]:
        """So many steps of the run are over, which ended at `_at` then; who ended with the last."""
        self._at += self._seconds(steps, self._decodes, self._attended)
        self._n += steps
        made = self._decodes * steps
        self._attended += made
        self._held += made
        self.decoded += made
        ended, ends = [], self._ends
        while ends and ends[0][0] <= self._n:
            _, _, run, seq = heappop(ends)
            if seq._run == run and seq._state == DECODE:
                self._leave_decode(seq)
                self._release(seq)
                ended.append(seq)
        if self._held + self._cached > self.kv:
            self._fit()
        return ended

    def _prefill_done(self) -> list[Sequence]:
        """The prefill step is over: chunks are in, and whoever is all in made a token by that, as
        every decode did."""
        chunks, self._chunks = self._chunks, []
        joined = []
        for seq, chunk in chunks:
            seq._todo -= chunk
            self.prefilled += chunk
            if seq._todo <= 0:
                joined.append(seq)
        if joined:
            # chunks go first come first served: only the last is partial
            self._prefill = self._prefill[len(joined) :]
        ended = []
        if self._decodes:
            ended = self._decode(1)
        for seq in joined:
            self._join(seq, ended)
        self._at = self._prefilled_at
        return ended

    def _join(self, seq: Sequence, ended: list[Sequence]) -> None:
        """Its first token is made; it decodes the others."""
        seq.made += 1
        seq._own += 1
        self._held += 1
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
        """It decodes from now on."""
        seq._from = self._n
        heappush(self._ends, (self._n + seq.left, seq._order, seq._run, seq))

    def _leave_decode(self, seq: Sequence) -> None:
        """Its count of tokens is brought up to date."""
        made = self._n - seq._from
        seq.made += made
        seq.left -= made
        seq.context += made
        seq._own += made
        self._decodes -= 1
        self._attended -= seq.context

    def _catch_up(self, now: float) -> None:
        """From the prefill step to the decode steps that follow it, if these are under way."""
        if self._then and now >= self._prefilled_at:
            self._steps, self._then = self._then, 0
            self._prefill_done()

    def _halt(self, now: float) -> None:
        """Bring the state to the boundary after `now`, or just before the run's end, which is not
        for here to report; `_begin` must follow."""
        self._catch_up(now)
        if self.due < math.inf and not self._chunks:
            self._decode(min(self._steps_until(now), self._steps - 1))
        elif self.due == math.inf and now > self._at:
            self._at = now

    # ----------------------------------------------------------------- memory

    def _admit(self) -> None:
        """Waiting sequences, first come first served, while they fit."""
        waiting = self._waiting
        while waiting and self._decodes + len(self._prefill) < self._max_sequences:
            seq = waiting[0]
            found = self._cache.get(seq.key) if self._caches else None
            prompt = self._prompts.get(seq.group) if self._caches else None
            own = seq.context - (seq.prompt if prompt is not None else 0)
            alone = not self._decodes and not self._prefill
            if not alone and self._held + own + WATERMARK * self.kv > self.kv:
                return
            waiting.popleft()
            seq._run += 1
            seq._state = PREFILL
            cached = 0
            if found is not None:
                cached = min(found[0], seq.context - seq.prompt)
                del self._cache[seq.key]
                self._cached -= found[0]
            if self._caches:
                if prompt is None:
                    self._prompts[seq.group] = [seq.prompt, 1]
                    self._held += seq.prompt
                    seq._todo, own = own - cached, own - seq.prompt
                else:
                    prompt[1] += found is None  # a cached trajectory is a user already
                    seq._todo = own - cached
            else:
                seq._todo = own
            seq._todo = max(seq._todo, 1)  # the last token is always computed
            seq._own = own
            self._held += own
            self._prefill.append(seq)
            if self._held + self._cached > self.kv:
                self._fit()

    def _release(self, seq: Sequence) -> None:
        """Its memory: free to be evicted, but for what is not computed yet."""
        self._held -= seq._own
        seq._state = NONE
        if not self._caches:
            return
        if seq._todo > seq._own:  # nor is the group's prompt: the next one computes it
            self._unshare(seq.group)
            return
        own = seq._own - seq._todo
        self._cache[seq.key] = (own, seq.group)
        self._cached += own
        if self._held + self._cached > self.kv:
            self._fit()

    def _unshare(self, group: str) -> None:
        prompt = self._prompts[group]
        prompt[1] -= 1
        if not prompt[1]:
            self._held -= prompt[0]
            del self._prompts[group]

    def _evict(self, tokens: int) -> None:
        """So many, or all, of what was used least recently."""
        key, (own, group) = next(iter(self._cache.items()))
        gone = min(own, tokens)
        self._cached -= gone
        if gone < own:
            self._cache[key] = (own - gone, group)
        else:
            del self._cache[key]
            self._unshare(group)

    def _fit(self) -> None:
        """Evict what is cached, least recently used first, until it fits."""
        while self._cache and (over := self._held + self._cached - self.kv) > 0:
            self._evict(math.ceil(over))

    def _drop(self, seq: Sequence) -> None:
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
        """To the head of the queue; what it made counts as context to be prefilled, but for what
        is still cached by then."""
        self._drop(seq)
        seq._state = WAITING
        self._waiting.appendleft(seq)

    def _preempt(self) -> None:
        """The newest that decodes (vLLM: its blocks are free, and cached until they are taken)."""
        newest = max(self._decoding(), key=lambda seq: seq._order)
        self.preemptions += 1
        self._back_to_queue(newest)
