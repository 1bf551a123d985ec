"""Which trainer rank the others wait for, from what all say of a long step. Pure.

Each reports what it has begun every `beat_s` seconds (rose/trainer/watch.py). One that waits goes
on reporting the same; one that is stopped, or whose node is, falls silent; one that hangs reports
less than the others. One that still reports may only be slow, and one that is between two steps
reports nothing: these have nearly the whole time of a step. Times are the reader's own: clocks of
hosts differ. Where all stand at the same place nobody can be named: the collective's own deadline
ends that.
"""

from __future__ import annotations

from collections.abc import Sequence

from rose.launch.rank_status import RankStatus

STILL_BEATS = 2  # in a step without a report a rank is silent; with the same report it stands still
LATE_BEATS = 7  # of the eight in a step's time: for ranks that report, or are in no step


class Beats:
    """What has been seen of the trainer ranks."""

    def __init__(self) -> None:
        # rank -> (what its last status said, `now` when that was first seen)
        self._heard: dict[int, tuple[float, float]] = {}  # its time
        self._moved: dict[int, tuple[int | None, float]] = {}  # what it has begun
        self._looked = 0.0

    def late(self, trainers: Sequence[RankStatus], now: float) -> tuple[list[RankStatus], int]:
        """(those that others wait for, what the foremost of these has begun). Call it at every look
        at the statuses, with a monotonic `now`, seconds."""
        beating = [s for s in trainers if s.begun is not None]
        beat_s = beating[0].beat_s if beating else 0.0
        if now - self._looked > beat_s:  # nothing to report, or the reader was away, or its disk
            self._heard, self._moved = {}, {}
        self._looked = now
        if not beating:
            return [], 0
        for s in trainers:
            if self._heard.get(s.rank, (None,))[0] != s.since:
                self._heard[s.rank] = (s.since, now)
            if self._moved.get(s.rank, (-1,))[0] != s.begun:
                self._moved[s.rank] = (s.begun, now)
        still = now - STILL_BEATS * beat_s
        late = now - LATE_BEATS * beat_s
        silent = [
            s for s in trainers if self._heard[s.rank][1] < (late if s.begun is None else still)
        ]
        waits = [s for s in beating if s not in silent and self._moved[s.rank][1] < still]
        if not waits:
            return [], 0
        most = max(s.begun for s in waits)
        behind = [s for s in waits if s.begun < most and self._moved[s.rank][1] < late]
        return silent or behind, most
