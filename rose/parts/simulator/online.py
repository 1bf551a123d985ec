"""A model of an online engine S that serves a request trace: when it computes, how much KV memory
it holds, and how late its tokens are.

S uses continuous batching with chunked prefill, first come first served. It is fast-forwarded:
while no request is in prefill, arrives or ends, one closed form stands for a run of decode steps.
If the trace marks equal prefixes, cached ones are reused. The cache has the memory that running
requests can't need, and evicts the least recently used blocks first.

With `pace_s` > 0, S shares its device with rollouts that always have work, under ROSE's gate. A
decode step begins no earlier than `pace_s` after the last one began, which the latency targets
allow, and rollouts compute in between. An arriving request waits only for the current rollout step,
half of `hold_s` on average. So S takes fewer, fuller steps.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np

from rose.parts.simulator.spec import Engine
from rose.parts.simulator.traces import BLOCK, Trace

P99 = 0.99  # definition: the 99th percentile, as a share


@dataclass(frozen=True)
class Served:
    """The record of serving: requests by arrival, and runs of equal steps by time."""

    at: np.ndarray  # (requests,) float64, seconds of arrival
    ttft_s: np.ndarray  # (requests,) float64
    tpot_s: np.ndarray  # (requests,) float64; nan for one token
    began: np.ndarray  # (runs,) float64, seconds
    ended: np.ndarray  # (runs,) float64, seconds
    busy_s: np.ndarray  # (runs,) seconds of computing within the run
    held: np.ndarray  # (runs, 2) tokens of KV at the run's begin and end
    gap_s: np.ndarray  # (runs,) seconds from one token of a request to its next
    tokens: np.ndarray  # (runs,) tokens generated after such a gap: all but the requests' first
    seconds: float  # duration of the trace

    @property
    def busy(self) -> float:
        """Share of the time in which S computes."""
        return float(self.busy_s.sum() / max(self.seconds, self.ended[-1]))

    def attained(self, ttft_slo_s: float, tpot_slo_s: float) -> float:
        """Share of requests within both targets."""
        return float(np.mean((self.ttft_s <= ttft_slo_s) & ~(self.tpot_s > tpot_slo_s)))

    def p99(self) -> tuple[float, float]:
        """P99 of TTFT and TPOT, seconds."""
        return float(np.quantile(self.ttft_s, P99)), float(np.nanquantile(self.tpot_s, P99))


def gap_p99(served: Sequence[Served]) -> float:
    """Return the P99 of the seconds between two tokens of a request, over all tokens of these
    devices; nan if there are none. TPOT hides such gaps: it is a mean over a request, so that a
    single delayed token hardly changes it."""
    gaps, tokens = (
        np.concatenate([getattr(each, name) for each in served]) for name in ("gap_s", "tokens")
    )
    order = np.argsort(gaps)
    upto = np.cumsum(tokens[order])
    return float(gaps[order][np.searchsorted(upto, P99 * upto[-1])]) if upto[-1] else math.nan


def serve(trace: Trace, engine: Engine, pace_s: float = 0.0, hold_s: float = 0.0) -> Served:
    """Serve a trace. Raises `ValueError` if it is empty, or a request exceeds the KV cache."""
    if not len(trace):
        raise ValueError("a trace without requests: there is nothing to serve")
    prompts, outputs = np.maximum(trace.prompt_tokens, 1), np.maximum(trace.output_tokens, 1)
    largest = int((prompts.astype(np.int64) + outputs).max())
    if largest > engine.kv_tokens:
        raise ValueError(
            f"a request of {largest} tokens is larger than the online engine's KV cache of "
            f"{engine.kv_tokens}; clip the trace (Trace.clipped) or give it more devices"
        )
    blocks = trace.blocks if engine.prefix_caching else None
    return _Run(
        trace.at.tolist(), prompts.tolist(), outputs.tolist(), engine, pace_s, hold_s, blocks
    ).all(trace)


class _Run:
    """The online engine while it serves a trace."""

    def __init__(
        self,
        arrivals: list[float],
        prompts: list[int],
        outputs: list[int],
        engine: Engine,
        pace_s: float,
        hold_s: float,
        blocks: tuple[tuple[int, ...], ...] | None,
    ) -> None:
        self._arrivals, self._prompts, self._outputs, self._e = arrivals, prompts, outputs, engine
        self._pace, self._hold, self._blocks = pace_s, hold_s, blocks
        # blocks of prefixes, the least recently used first
        self._cache: OrderedDict[int, None] = OrderedDict()
        self._shared = 0  # tokens of prompts that are both held by requests and in the cache
        self._now = 0.0
        self._next = 0  # index of the next request to admit
        self._prefill: list[list[int]] = []  # [request, tokens done]
        self._ends: list[tuple[int, int]] = []  # heap of (step at which it ends, request)
        self._steps = 0  # decode steps so far
        self._attended = 0  # sum of the contexts of the decoding requests
        # Most tokens that the admitted requests can hold. S reserves them, and never preempts.
        self._held = 0
        self._first = [math.nan] * len(arrivals)  # time of each request's first token
        self._last = [math.nan] * len(arrivals)  # time of each request's last token
        # a row per run: began, ended, busy_s, held (2), gap_s and tokens of `Served`
        self._runs: list[tuple[float, float, float, int, int, float, int]] = []

    def all(self, trace: Trace) -> Served:
        """Serve all requests of the trace."""
        count = len(self._arrivals)
        while self._next < count or self._prefill or self._ends:
            self._admit()
            if self._prefill:
                self._prefill_step()
            elif self._ends:
                self._decode_run()
            else:
                self._now = self._arrivals[self._next] + self._delay
        first, last, at = np.array(self._first), np.array(self._last), np.array(self._arrivals)
        made = np.maximum(trace.output_tokens, 1)
        with np.errstate(invalid="ignore", divide="ignore"):
            tpot = np.where(made > 1, (last - first) / (made - 1), math.nan)
        runs = np.array(self._runs)
        return Served(
            at,
            first - at,
            tpot,
            runs[:, 0],
            runs[:, 1],
            runs[:, 2],
            runs[:, 3:5],
            runs[:, 5],
            runs[:, 6],
            trace.seconds,
        )

    @property
    def _delay(self) -> float:
        """Mean delay of a request that arrives while rollouts compute, seconds."""
        return self._hold / 2

    def _admit(self) -> None:
        """Admit requests that have arrived, in order, while they fit."""
        arrivals, engine, at = self._arrivals, self._e, self._next
        while (
            at < len(arrivals)
            and arrivals[at] <= self._now
            and len(self._ends) + len(self._prefill) < engine.max_sequences
            and self._held + (need := self._prompts[at] + self._outputs[at]) <= engine.kv_tokens
        ):
            self._held += need
            self._prefill.append([at, self._cached(at)])
            at += 1
        self._next = at

    def _cached(self, request: int) -> int:
        """Return the cached tokens of a request's prompt. S always computes the last token."""
        if self._blocks is None:
            return 0
        whole = self._blocks[request]
        known = next(
            (place for place, block in enumerate(whole) if block not in self._cache), len(whole)
        )
        return min(known * BLOCK, self._prompts[request] - 1)

    def _keep(self, request: int) -> None:
        """Cache the prompt's blocks as most recently used, and evict blocks that no longer fit."""
        if self._blocks is None:
            return
        self._shared += self._prompts[request]
        for block in reversed(self._blocks[request]):  # The last block is evicted first.
            self._cache[block] = None
            self._cache.move_to_end(block)
        while (
            len(self._cache) * BLOCK > self._e.kv_tokens - self._held + self._shared and self._cache
        ):
            self._cache.popitem(last=False)

    def _prefill_step(self) -> None:
        """Advance by one step with chunks of prompts and a token of each decoding request."""
        c, decodes = self._e.step, len(self._ends)
        room, cost, whole = max(1, self._e.max_batched_tokens - decodes), 0.0, 0
        before = self._used()
        for chunk in self._prefill:
            request, done = chunk
            new = min(self._prompts[request] - done, room)
            cost += new * (c.c1 + c.c2 * (done + new / 2))
            chunk[1] += new
            room -= new
            whole += chunk[1] == self._prompts[request]
            if not room:
                break
        seconds = max(c.c0, cost) + c.c3 * decodes + c.c4 * self._attended + c.c5
        began, self._now = self._now, self._now + seconds
        self._advance(1)
        joined, self._prefill = self._prefill[:whole], self._prefill[whole:]
        for request, prompt in joined:
            self._first[request] = self._now
            self._keep(request)
            self._enter(request, prompt)
        self._runs.append((began, self._now, seconds, before, self._used(), seconds, decodes))

    def _enter(self, request: int, prompt: int) -> None:
        """Let a prefilled request decode. A request of one token ends instead."""
        if self._outputs[request] == 1:
            self._leave(request)
            return
        self._attended += prompt + 1
        heappush(self._ends, (self._steps + self._outputs[request] - 1, request))

    def _decode_run(self) -> None:
        """Advance by decode steps until a request ends, or one arrives that can be admitted."""
        steps = self._ends[0][0] - self._steps
        began, before, decodes = self._now, self._used(), len(self._ends)
        arrival = (
            self._arrivals[self._next] + self._delay
            if self._next < len(self._arrivals)
            else math.inf
        )
        has_place = len(self._ends) < self._e.max_sequences
        # A request that can't be admitted on arrival waits for memory until a request ends.
        if has_place and arrival < began + self._wall(steps) and self._has_memory_for_next():
            steps = max(1, min(steps, self._until(arrival - began)))
        busy, wall = self._work(steps), self._wall(steps)
        self._now = began + wall
        # The arriving request ends the pause after the last step: the next step need not wait.
        if self._pace and steps and began < arrival < self._now:
            self._now = max(arrival, began + self._wall(steps - 1) + (busy - self._work(steps - 1)))
        self._advance(steps)
        gap_s = (self._now - began) / steps
        self._runs.append((began, self._now, busy, before, self._used(), gap_s, decodes * steps))

    def _has_memory_for_next(self) -> bool:
        """Return whether there is memory to admit the next request now."""
        needed = self._prompts[self._next] + self._outputs[self._next]
        return self._held + needed <= self._e.kv_tokens

    def _work(self, steps: int) -> float:
        """Seconds of computing of the next `steps` decode steps."""
        c, decodes = self._e.step, len(self._ends)
        return steps * (
            c.c0 + c.c5 + c.c3 * decodes + c.c4 * (self._attended + decodes * (steps - 1) / 2)
        )

    def _wall(self, steps: int) -> float:
        """Seconds of the next `steps` decode steps, pauses included."""
        return max(self._work(steps), steps * self._pace)

    def _until(self, seconds: float) -> int:
        """Least number of decode steps that end at `seconds` from now or later."""
        c, decodes = self._e.step, len(self._ends)
        growth = c.c4 * decodes
        first = c.c0 + c.c5 + c.c3 * decodes + c.c4 * self._attended - growth / 2
        steps = (
            2 * seconds / (first + math.sqrt(first * first + 2 * growth * seconds))
            if seconds > 0
            else 0.0
        )
        return math.ceil(min(steps, seconds / self._pace) if self._pace else steps)

    def _advance(self, steps: int) -> None:
        """Count `steps` decode steps, and end the requests that have all their tokens."""
        self._attended += steps * len(self._ends)
        self._steps += steps
        while self._ends and self._ends[0][0] <= self._steps:
            _, request = heappop(self._ends)
            self._attended -= self._prompts[request] + self._outputs[request]
            self._leave(request)

    def _leave(self, request: int) -> None:
        """End the request now, and free its memory."""
        self._last[request] = self._now
        self._held -= self._prompts[request] + self._outputs[request]
        self._shared -= self._prompts[request] if self._blocks is not None else 0

    def _used(self) -> int:
        """Tokens of KV in use."""
        return self._attended + sum(done for _, done in self._prefill)
