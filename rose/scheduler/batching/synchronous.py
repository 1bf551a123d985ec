"""A step trains on its own groups only."""

from __future__ import annotations

from typing import Any

from rose.scheduler.batching.round import Round, check
from rose.scheduler.batching.stream import Stream
from rose.scheduler.events import Action


class Synchronous:
    """A step trains on exactly its own groups, all made by the current version; the trainer waits
    for the slowest (veRL, arXiv 2409.19256; ROLL with GRPO, arXiv 2506.06122).

    A group that the filter refuses is replaced by the next prompt (dynamic sampling, DAPO section
    3.2), up to `max_admitted` times the groups wanted; from then on refused groups are used, newest
    last, so that a solved task can't sample for ever. veRL's recipe gives up after 10 such batches;
    8 is ours. Live: nothing is missing.
    """

    staleness = 0
    oversample = 1.0

    def __init__(self, max_admitted: float) -> None:
        check(max_admitted)
        self.max_admitted = max_admitted
        self._stream = Stream()
        self._step = 0
        self._round: Round | None = None  # None while the trainer trains

    def begin(self, step: int, groups: int) -> list[Action]:
        self._step = step
        self._round = Round(groups, self._stream.admit, self.oversample, self.max_admitted)
        return self._round.fill()

    def finished(self, group: str, accepted: bool) -> list[Action]:
        if self._round is None:
            return []
        actions = self._round.finished(group, accepted)
        if not self._round.complete:
            return actions
        done, self._round = self._round, None
        self._over(done)
        return actions + done.close(self._step)

    def _over(self, done: Round) -> None:
        """What becomes of the groups that `done` leaves open: nothing, they are cancelled."""

    def snapshot(self) -> dict[str, Any]:
        return self._stream.snapshot(self._round.groups if self._round else ())

    def restore(self, state: dict[str, Any]) -> None:
        self._stream.restore(state)
        self._round = None
