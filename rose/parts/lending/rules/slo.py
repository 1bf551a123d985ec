"""Latency targets of the online engine S: how long S may be delayed, and whether it meets them.

Pure. TTFT is the time from a request's arrival to its first token, TPOT the mean time per token
after that. S serves requests in order of arrival, in steps of at most `max_batched_tokens`, with
chunks of prompts beside the running decodes. All times are CLOCK_MONOTONIC in seconds, unlike
vLLM's `Request.arrival_time`, which is wall-clock time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from operator import attrgetter
from typing import NamedTuple

from rose.parts.lending.config import Slo
from rose.parts.lending.rules.predictor import Predictor, Work

_ARRIVAL = attrgetter("arrival")
INFINITE = float("inf")
# Longest gap between two tokens of a request that is ahead of its target, in TPOT targets.
CREDIT = 4.0
WINDOW = 200  # number of last requests by which S is judged
JUDGED = 50  # least number of requests by which S is judged
# If a larger share of requests without lending misses its targets, S misses its targets even alone.
# A P99 target allows 0.01. By chance, 3 of 50 requests miss it in 1 of 70 windows.
MISSES = 0.05
RECOVERED = 0.025  # share of missed requests at which S meets its targets again
# Seconds without a request after which an S that misses its targets lends again until its next
# request, since an idle S misses no target. Longer than most pauses within a busy time.
IDLE_S = 300.0
FACTOR = 0.9  # factor by which a late first token changes `Promptness`; an early one divides by it
FORGET_S = 60.0  # seconds without a first token after which `Promptness` is 1 again


class Request(NamedTuple):
    """An online request, as its scheduler sees it before a step."""

    arrival: float
    prompt_left: int  # tokens to compute before its next token; 0 for a decode
    context: int  # tokens computed so far
    first_token_at: float | None = None
    tokens: int = 0  # generated tokens, the first included
    last_token_at: float | None = None  # None: just now


def hold_until(
    now: float,
    requests: Iterable[Request],
    predictor: Predictor,
    slo: Slo,
    max_batched_tokens: int = 2048,
    max_sequences: int | None = None,
) -> float:
    """Return until when S could be kept from the device with every next token still in time.

    S's own steps count with their P99 time. The result is before `now` if a token is already late,
    and infinite without requests. With more requests than `max_sequences`, it is `now` at most,
    because some must wait for the end of others, which can't be predicted.

    A waiting request's first token is due at arrival + ttft_p99_s. A running request's next token
    is due when its mean TPOT would reach tpot_p99_s, at the latest CREDIT x tpot_p99_s after its
    last token.
    """
    decodes = context = count = 0
    urgent = INFINITE  # when the first decode is due
    queue = []
    for request in requests:
        count += 1
        if request.prompt_left > 0 or request.first_token_at is None:
            queue.append(request)
        else:
            decodes += 1
            context += request.context
            urgent = min(urgent, _due(now, request, slo))
    if not count:
        return INFINITE
    if not queue:
        return urgent - predictor.p99(Work((), decodes, context))
    queue.sort(key=_ARRIVAL)
    hold = _prefill(now, queue, decodes, context, urgent, predictor, slo, max_batched_tokens)
    return hold if max_sequences is None or count <= max_sequences else min(now, hold)


def _prefill(
    now: float,
    queue: list[Request],
    decodes: int,
    context: int,
    urgent: float,
    predictor: Predictor,
    slo: Slo,
    max_batched_tokens: int,
) -> float:
    """Compute `hold_until` step by step, for a queue of prompts beside `decodes` running requests.
    `urgent` is the time at which the first of these needs a token."""
    hold = INFINITE
    spent = 0.0  # seconds of the steps so far
    chunks: list[tuple[int, int]] = []
    due, joining, joining_context = INFINITE, 0, 0  # the prompts that end in this step
    room = max(1, max_batched_tokens - decodes)
    last = len(queue) - 1
    for at, request in enumerate(queue):
        left, before = max(1, request.prompt_left), request.context
        while left:
            new = min(left, room)
            chunks.append((new, before))
            left, before, room = left - new, before + new, room - new
            if not left:
                due = min(due, _due(now, request, slo))
                joining += 1
                joining_context += before
            if room and at < last:
                continue  # the step takes the next prompt's first chunk, too
            spent += predictor.p99(Work(tuple(chunks), decodes, context))
            hold = min(hold, min(due, urgent) - spent)
            urgent += slo.tpot_p99_s  # each decode has generated a token
            decodes, context = decodes + joining, context + joining_context
            chunks, due, joining, joining_context = [], INFINITE, 0, 0
            room = max(1, max_batched_tokens - decodes)
    return hold


def _due(now: float, request: Request, slo: Slo) -> float:
    """Return when the request's next token is due."""
    if request.first_token_at is None:
        return request.arrival + slo.ttft_p99_s
    last = now if request.last_token_at is None else request.last_token_at
    return min(
        request.first_token_at + request.tokens * slo.tpot_p99_s, last + CREDIT * slo.tpot_p99_s
    )


class Promptness:
    """The factor on lending.step_share, in [0.01, 1], that keeps the median TTFT at ttft_p50_s. A
    first token later than ttft_p50_s lowers the factor, an earlier one raises it. So it settles
    where half of the first tokens are late (stochastic approximation, Robbins and Monro, 1951).
    After FORGET_S without a first token it is 1 again, so that an idle device is lent."""

    def __init__(self, slo: Slo) -> None:
        self._target = slo.ttft_p50_s
        self._share, self._at = 1.0, -INFINITE

    def add(self, now: float, ttft_s: float) -> None:
        """Count a first token that was generated at `now`."""
        share = self.share(now) * (FACTOR if ttft_s > self._target else 1 / FACTOR)
        self._share, self._at = min(max(share, 0.01), 1.0), now

    def share(self, now: float) -> float:
        return 1.0 if now - self._at > FORGET_S else self._share


def why_not_alone(predictor: Predictor, slo: Slo, tokens: int, max_batched_tokens: int) -> str:
    """Return why S can't meet its targets for one request of `tokens` tokens even without lending,
    or "" if it can. A request's TPOT is the mean over its steps. So both TPOT targets are compared
    with the mean time of a step, and not with the P99 of single steps."""
    step = Work((), 1, tokens)
    arrived = [Request(0.0, tokens, 0)]
    p99 = slo.ttft_p99_s - hold_until(0.0, arrived, predictor, slo, max_batched_tokens)
    chunk = Work(((1, 0),), 0, 0)
    # All steps with prefill have the same margin, so this ratio converts the P99 to the mean.
    p50 = p99 * predictor.seconds(chunk) / predictor.p99(chunk)
    decode = f"a step of 1 decode of {tokens} tokens of context"
    prompt = f"the prefill of {tokens} tokens"
    for what, takes, name in (
        (decode, predictor.seconds(step), "tpot_p99_s"),
        (decode, predictor.seconds(step), "tpot_p50_s"),
        (prompt, p99, "ttft_p99_s"),
        (prompt, p50, "ttft_p50_s"),
    ):
        if takes > (target := getattr(slo, name)):
            kind = "at its P99" if name == "ttft_p99_s" else "on average"
            return (
                f"serving.online.slo.{name}={target:g} s can't be met even alone: {what} takes "
                f"{takes:.3g} s {kind} on this device; give a looser target, a faster device or a "
                "smaller model"
            )
    return ""


class Attainment:
    """Counts requests that met both P99 targets, with and without lending while they ran."""

    def __init__(self, slo: Slo) -> None:
        self._slo = slo
        self.finished = self.met = self.finished_lending = self.met_lending = 0
        self._alone: deque[bool] = deque(maxlen=WINDOW)
        self._misses, self._at = False, -INFINITE

    def misses_alone(self, now: float, busy: bool) -> bool:
        """True if S misses its targets even without lending, judged by the last WINDOW requests.
        But false once S has been idle for IDLE_S, because an idle S misses no target. Idle time is
        measured from the last call with `busy` (S has a request), so call this often."""
        if busy:
            self._at = now
        return self._misses and now - self._at <= IDLE_S

    def add(self, now: float, ttft_s: float | None, tpot_s: float | None, lent: bool) -> bool:
        """Count a request that ended at `now`; return True if it met both P99 targets. `ttft_s` is
        None without a token, `tpot_s` None with at most one. `lent` is true if anything was lent
        while the request was in the engine. The caller counts a request whose client disconnected
        only if it had already missed its TTFT target."""
        prompt = ttft_s is not None and ttft_s <= self._slo.ttft_p99_s
        met = prompt and (tpot_s is None or tpot_s <= self._slo.tpot_p99_s)
        self._at = now
        self.finished += 1
        self.met += met
        if lent:
            self.finished_lending += 1
            self.met_lending += met
        else:
            self._alone.append(met)
        if len(self._alone) >= JUDGED:
            share = self._alone.count(False) / len(self._alone)
            self._misses = share > (RECOVERED if self._misses else MISSES)
        return met
