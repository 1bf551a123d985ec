"""The gate that decides when the rollout engine R may begin a step, and how large it may be. Pure.

A step of R whose P99 time is T delays a concurrent step of the online engine S by at most h T; h is
the interference measured by rose.parts.lending.profile. If S stops R's steps between layers
(rose/parts/lending/flag.py), h is divided by the number of parts of a step. R's step may begin if
1. S still meets every target after a delay of h T (now + h T <= hold_until), and
2. a request that arrives just after the step begins loses at most step_share of its TTFT target, or
   less if the median TTFT requires it (slo.Promptness), and
3. decodes of S beside rollouts meet the median TPOT target.

vLLM plans a step while the last one still runs, so T includes the remaining time of steps that were
admitted before. A board or value that is missing, stale, damaged or not a number shuts the gate.
"""

from __future__ import annotations

import enum
from typing import Any, NamedTuple

from rose.parts.lending.board import Control, Online
from rose.parts.lending.config import Lending, Slo
from rose.parts.lending.rules.predictor import Predictor, Work

# Seconds after which the operator's board counts as silent. The limit is generous, because the
# operator's process may be busy starting an engine.
CONTROL_STALE_S = 2.0
# Seconds by which a board's time may be in the future: written after the reader took the time.
AHEAD_S = 0.001


class Reason(enum.IntEnum):
    """The reason why the gate is shut."""

    OPEN = 0
    NO_PROFILE = 1
    NO_SLO = 2
    CONTROL_SILENT = 3  # the operator's board is absent, damaged or stale
    STOPPED = 4  # the operator stopped lending
    HOUR = 5  # nothing is lent at this hour
    ONLINE_SILENT = 6  # the online engine's board is absent, damaged or stale
    ONLINE_REFUSES = 7  # the online engine lends nothing
    SLACK = 8  # an online request would miss its target
    STEP_SHARE = 9  # even the smallest step would delay a future request too long
    PACE = 10  # online requests, decoding beside rollouts, would miss tpot_p50_s
    DEVICE_BUSY = 11  # the online engine stops R's steps between layers and lets none go on


class Admission(NamedTuple):
    tokens: int  # most tokens of the step; 0: no step may begin
    reason: Reason


class Gate:
    """Admits steps of R. `profile` is the device's profile (rose.parts.lending.profile), or None.
    `predictor` predicts R's step times; R's scheduler refines it with each step. `parts`: number of
    parts of R's step between which S can stop it. Raises `ValueError` for an invalid profile."""

    def __init__(
        self, lending: Lending, slo: Slo | None, profile: dict[str, Any] | None, parts: int = 1
    ) -> None:
        self._lending, self._slo, self._parts = lending, slo, parts
        self.predictor: Predictor | None = None
        self.hold = 0.0  # h at its P99
        self.hold_mean = 0.0  # mean of h
        if profile is not None:
            try:
                self.predictor = Predictor.from_dict(profile["rollout"]["predictor"])
                self.hold = float(profile["interference"]["hold_p99"])
                self.hold_mean = min(float(profile["interference"]["hold_mean"]), 1.0)
            except (KeyError, TypeError) as error:
                raise ValueError(
                    f"not a profile of rose.parts.lending.profile: {error!r}"
                ) from None
            if not 0 <= self.hold < float("inf"):
                raise ValueError(
                    f"profile: interference.hold_p99={self.hold:g} must be a finite number >= 0"
                )

    def admit(
        self,
        now: float,
        online: Online | None,
        control: Control | None,
        demand: Work,
        ahead: tuple[float, float] = (0.0, 0.0),
    ) -> Admission:
        """Return how many tokens of `demand`, decodes first, may be one step now. An empty demand
        counts as one decode. `ahead`: mean and P99 of the seconds until R's steps in flight end."""
        if self.predictor is None:
            return Admission(0, Reason.NO_PROFILE)
        if self._slo is None:
            return Admission(0, Reason.NO_SLO)
        if reason := lent(now, online, control, self._lending):
            return Admission(0, reason)
        parts = self._parts if control.stops > 0 else 1
        hold, hold_mean = self.hold / parts, self.hold_mean / parts
        share = self._lending.step_share * self._slo.ttft_p99_s * online.prompt_share
        share, slack = share - hold * ahead[0], online.hold_until - now - hold * ahead[1]
        demand = demand if demand.tokens else Work((), 1, 0)
        one = part(demand, 1)
        for fits, reason in (
            (hold * self.predictor.seconds(one) <= share, Reason.STEP_SHARE),
            (hold * self.predictor.p99(one) <= slack, Reason.SLACK),
            (online.decode_s <= self._slo.tpot_p50_s * (1 - hold_mean), Reason.PACE),
        ):
            if not fits:  # true for NaN, too
                return Admission(0, reason)
        return Admission(self._largest(demand, hold, share, slack), Reason.OPEN)

    def _largest(self, demand: Work, hold: float, share: float, slack: float) -> int:
        """Find the most tokens that fit, by bisection. The caller knows that 1 fits."""

        def fits(tokens: int) -> bool:
            work = part(demand, tokens)
            return (
                hold * self.predictor.seconds(work) <= share
                and hold * self.predictor.p99(work) <= slack
            )

        low, most = 1, min(self._lending.chunk_tokens, demand.tokens)
        if most == 1 or fits(most):
            return most
        while most - low > 1:
            middle = (low + most) // 2
            low, most = (middle, most) if fits(middle) else (low, middle)
        return low


def lent(now: float, online: Online | None, control: Control | None, lending: Lending) -> Reason:
    """Return OPEN if both the operator and the online engine lend, else the reason why not."""
    if control is None or not _fresh(now, control.beat, CONTROL_STALE_S):
        return Reason.CONTROL_SILENT
    if not control.lend > 0:
        return Reason.STOPPED
    if not control.share > 0:
        return Reason.HOUR
    if online is None or not _fresh(now, online.beat, lending.stale_after_s):
        return Reason.ONLINE_SILENT
    if not online.lends > 0:
        return Reason.ONLINE_REFUSES
    return Reason.OPEN


def _fresh(now: float, beat: float, stale_after_s: float) -> bool:
    """True if a board that was written at `beat` is not older than `stale_after_s`."""
    return -AHEAD_S <= now - beat <= stale_after_s


def part(work: Work, tokens: int) -> Work:
    """Return the first `tokens` of `work` in vLLM's order: decodes, then prompts in their order."""
    if tokens <= work.decodes:
        return Work((), tokens, work.decode_context * tokens // max(1, work.decodes))
    left, chunks = tokens - work.decodes, []
    for new, before in work.prefill:
        if left <= 0:
            break
        chunks.append((min(new, left), before))
        left -= new
    return Work(tuple(chunks), work.decodes, work.decode_context)
