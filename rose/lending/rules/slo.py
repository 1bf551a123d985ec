"""Latency targets of the online engine S: how long it may be kept waiting, and whether it keeps
them. Pure.

TTFT is the time from a request's arrival to its first token, TPOT the mean time per token after
that. S serves requests in order of arrival in steps of at most `max_batched_tokens`, prompts in
chunks beside the running decodes. All times are CLOCK_MONOTONIC, in seconds (vLLM's
`Request.arrival_time` is not: it is the wall clock's).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from operator import attrgetter
from typing import NamedTuple

from rose.config.serving import Slo
from rose.lending.rules.predictor import Predictor, Work

_ARRIVAL = attrgetter("arrival")
INFINITE = float("inf")
# times the TPOT target: the longest gap between two tokens that a request ahead of its target may
# see
CREDIT = 4.0
WINDOW = 200  # requests by which S is judged
JUDGED = 50  # of them at least
# of them: above the first S misses its targets by itself, until below the second;
MISSES, RECOVERED = (0.05, 0.025)
# a P99 target allows 0.01, and 3 misses of 50 still happen by chance in 1 of 70 such windows
STEP = 0.9  # by which one first token changes `Promptness`
FORGET_S = 60.0  # without one


class Request(NamedTuple):
    """One online request, as its scheduler sees it before a step."""

    arrival: float
    prompt_left: int  # tokens to compute before its next token; 0 for a decode
    context: int  # tokens computed so far
    first_token_at: float | None = None
    tokens: int = 0  # made, the first included
    last_token_at: float | None = None  # null: just now


def hold_until(
    now: float,
    requests: Iterable[Request],
    predictor: Predictor,
    slo: Slo,
    max_batched_tokens: int = 2048,
    max_sequences: int | None = None,
) -> float:
    """The latest time until which S could be kept from the device with every request's next token
    still in time, S's own steps at their P99. Before `now` when it is too late already; infinite
    without requests. With more requests than `max_sequences` some wait for others to finish, which
    nobody can predict: then it is `now`.

    A waiting request's first token is due at arrival + ttft_p99_s. A running one's next token is
    due when its mean TPOT would reach tpot_p99_s, but no later than CREDIT x tpot_p99_s after its
    last.
    """
    decodes = context = count = 0
    urgent = INFINITE  # when the first of the decodes is due
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
    """`hold_until` for a queue of prompts before which `decodes` run, step by step."""
    hold, spent = INFINITE, 0.0  # seconds of the steps before
    chunks: list[tuple[int, int]] = []
    due, joining, joining_context = INFINITE, 0, 0  # of the prompts that end in this step
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
                continue  # the next prompt's first chunk goes along
            spent += predictor.p99(Work(tuple(chunks), decodes, context))
            hold = min(hold, min(due, urgent) - spent)
            urgent += slo.tpot_p99_s  # the decodes have made a token
            decodes, context = decodes + joining, context + joining_context
            chunks, due, joining, joining_context = [], INFINITE, 0, 0
            room = max(1, max_batched_tokens - decodes)
    return hold


def _due(now: float, request: Request, slo: Slo) -> float:
    if request.first_token_at is None:
        return request.arrival + slo.ttft_p99_s
    last = now if request.last_token_at is None else request.last_token_at
    return min(
        request.first_token_at + request.tokens * slo.tpot_p99_s, last + CREDIT * slo.tpot_p99_s
    )


class Promptness:
    """How much of what a rollout step may hold a request up (lending.step_share) leaves the median
    TTFT at ttft_p50_s: in (0, 1], less after each first token that came later, more after each that
    came sooner, so that it settles where as many are late as are not (the quantile as a fixed
    point; Robbins and Monro, 1951). After FORGET_S without a first token it begins anew: an idle
    device is lent."""

    def __init__(self, slo: Slo) -> None:
        self._target = slo.ttft_p50_s
        self._share, self._at = 1.0, -INFINITE

    def add(self, now: float, ttft_s: float) -> None:
        """A first token came at `now`, of CLOCK_MONOTONIC."""
        share = self.share(now) * (STEP if ttft_s > self._target else 1 / STEP)
        self._share, self._at = min(max(share, 0.01), 1.0), now

    def share(self, now: float) -> float:
        return 1.0 if now - self._at > FORGET_S else self._share


def why_not_alone(predictor: Predictor, slo: Slo, tokens: int, max_batched_tokens: int) -> str:
    """Return why S can't meet its targets even with the device for itself, for one request of so
    many tokens; "" if it can. Otherwise nothing is to be lent.

    A TPOT is the mean of a request's steps, so both targets of TPOT are compared with the mean:
    where single steps vary much, their own P99 says nothing of a request's.
    """
    step = Work((), 1, tokens)
    arrived = [Request(0.0, tokens, 0)]
    p99 = slo.ttft_p99_s - hold_until(0.0, arrived, predictor, slo, max_batched_tokens)
    chunk = Work(((1, 0),), 0, 0)
    # all steps with prefill have one margin
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
    """Requests that met both P99 targets, with and without anything lent while they ran."""

    def __init__(self, slo: Slo) -> None:
        self._slo = slo
        self.finished = self.met = self.finished_lending = self.met_lending = 0
        self._alone: deque[bool] = deque(maxlen=WINDOW)
        # S misses its targets by itself, by the last WINDOW requests without lending
        self.misses_alone = False

    def add(self, ttft_s: float | None, tpot_s: float | None, lent: bool) -> bool:
        """A request ended: its TTFT (null: no token came), its TPOT (null: one token), and whether
        anything was lent while it was here. Returns whether it met the targets. A client that hangs
        up is not S's miss: leave it out unless it had missed its TTFT already."""
        prompt = ttft_s is not None and ttft_s <= self._slo.ttft_p99_s
        met = prompt and (tpot_s is None or tpot_s <= self._slo.tpot_p99_s)
        self.finished += 1
        self.met += met
        if lent:
            self.finished_lending += 1
            self.met_lending += met
        else:
            self._alone.append(met)
        if len(self._alone) >= JUDGED:
            share = self._alone.count(False) / len(self._alone)
            self.misses_alone = share > (RECOVERED if self.misses_alone else MISSES)
        return met
