"""Find trainer ranks that hang, from the progress that all trainer ranks report in a step. Pure.

Every `beat_s` seconds of a step each trainer rank reports how many collectives and micro-batches it
has begun (rose/trainer/watch.py):
- a rank that waits for another repeats its number;
- a rank that is stopped, or whose node is, falls silent;
- a rank that hangs reports a smaller number than the others.

A rank that still reports may only be slow, and a rank between two steps reports nothing. Such ranks
are named only after nearly the whole time that a step may take. Ages are measured by the reader's
clock, since the clocks of hosts differ. If all ranks report the same number, none can be named, and
the collective's own deadline ends the wait.
"""

from __future__ import annotations

from collections.abc import Sequence

from rose.launch.rank_status import RankStatus

# A rank in a step counts as silent after this many beats without a report. It counts as waiting
# after this many beats with the same number.
STILL_BEATS = 2
# A rank that repeats a smaller number, or is silent outside a step, is named after this many beats.
# A step may take eight beats (rose/trainer/watch.py).
LATE_BEATS = 7


class Beats:
    """Last report of each trainer rank, and when the reader first saw it."""

    def __init__(self) -> None:
        # rank -> (a value of its last status, `now` when the reader first saw that value)
        self._reported: dict[int, tuple[float, float]] = {}  # value: `since`
        self._moved: dict[int, tuple[int | None, float]] = {}  # value: `begun`
        self._polled_at = 0.0

    def hanging(self, trainers: Sequence[RankStatus], now: float) -> tuple[list[RankStatus], int]:
        """Return (the ranks that others wait for, the largest `begun` of a waiting rank). Call this
        at every poll of the statuses. `now`: monotonic seconds."""
        beating = [s for s in trainers if s.begun is not None]
        beat_s = beating[0].beat_s if beating else 0.0
        # Start over if no rank is in a step, or if the reader itself missed a beat (suspended, or
        # waiting for its disk).
        if now - self._polled_at > beat_s:
            self._reported, self._moved = {}, {}
        self._polled_at = now
        if not beating:
            return [], 0
        for s in trainers:
            if self._reported.get(s.rank, (None,))[0] != s.since:
                self._reported[s.rank] = (s.since, now)
            if self._moved.get(s.rank, (-1,))[0] != s.begun:
                self._moved[s.rank] = (s.begun, now)
        still = now - STILL_BEATS * beat_s
        late = now - LATE_BEATS * beat_s
        silent = [
            s for s in trainers if self._reported[s.rank][1] < (late if s.begun is None else still)
        ]
        waits = [s for s in beating if s not in silent and self._moved[s.rank][1] < still]
        if not waits:
            return [], 0
        most = max(s.begun for s in waits)
        behind = [s for s in waits if s.begun < most and self._moved[s.rank][1] < late]
        return silent or behind, most
