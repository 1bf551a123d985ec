"""Find the trainer ranks that the others wait for, from what all report of a long step. Pure.

Every `beat_s` seconds of a step each trainer rank reports how many collectives and micro-batches it
has begun (rose/trainer/watch.py):
- a rank that waits for another repeats its number;
- a rank that is stopped, or whose node is, falls silent;
- a rank that hangs reports a smaller number than the others.

A rank that still reports may only be slow, and a rank between two steps reports nothing. So these
two have nearly the whole time that a step may take. Ages are measured by the reader's clock, since
the clocks of hosts differ. If all ranks stand at the same number none can be named, and the
collective's own deadline ends the wait.
"""

from __future__ import annotations

from collections.abc import Sequence

from rose.launch.rank_status import RankStatus

# A rank in a step is silent after this many beats without a report, and waits or hangs after as
# many with the same report.
STILL_BEATS = 2
# Beats after which a rank that repeats its report, or is in no step, is named. The time that a step
# may take has eight beats (rose/trainer/watch.py).
LATE_BEATS = 7


class Beats:
    """Last report of each trainer rank, and when the reader first saw it."""

    def __init__(self) -> None:
        # rank -> (value in its last status, `now` when the reader first saw that value)
        self._reported: dict[int, tuple[float, float]] = {}  # value: the status's own time
        self._moved: dict[int, tuple[int | None, float]] = {}  # value: `begun`
        self._polled_at = 0.0

    def hanging(self, trainers: Sequence[RankStatus], now: float) -> tuple[list[RankStatus], int]:
        """Return (the ranks that others wait for, what the foremost waiting rank has begun). Call
        it at every poll of the statuses, with a monotonic `now`, seconds."""
        beating = [s for s in trainers if s.begun is not None]
        beat_s = beating[0].beat_s if beating else 0.0
        # No rank is in a step, or the reader itself was suspended or waited for its disk.
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
