"""veRL (arXiv 2409.19256): synchronous steps, and its one-step-off-policy recipe."""

from __future__ import annotations

from typing import Any

from rose.policies.batches import Round, Stream, check
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

    def certain(self) -> list[str]:
        return self._round.certain if self._round else []

    def _over(self, done: Round) -> None:
        """What becomes of the groups that `done` leaves open: nothing, they are cancelled."""

    def snapshot(self) -> dict[str, Any]:
        return self._stream.snapshot(self._round.groups if self._round else ())

    def restore(self, state: dict[str, Any]) -> None:
        self._stream.restore(state)
        self._round = None


class OneStepOff:
    """A step trains on a batch admitted under the last version, while the next one is generated:
    staleness 1, but for the first batch (Noukhovitch et al., arXiv 2410.18252; veRL's
    one-step-off-policy recipe; ROSE's one-step-off).

    When a batch is complete it trains, and the whole next one is admitted in the same moment.
    Batches don't mix: a slow group holds up its own batch, never another (`bounded_staleness` with
    eta=1 mixes). A group that the filter refuses is replaced within its batch, up to `max_admitted`
    times it, as in `synchronous`. After the last step one batch has been begun in vain: no policy
    is given the last step. Live: turns in flight when the new version comes go on by
    `transfer.in_flight`, so a trajectory may end on newer weights than it began with.
    """

    staleness = 1

    def __init__(self, max_admitted: float) -> None:
        check(max_admitted)
        self.max_admitted = max_admitted
        self._stream = Stream()
        self._wanted: int | None = (
            None  # the step that waits for its batch; None while the trainer trains
        )
        self._round: Round | None = None

    def begin(self, step: int, groups: int) -> list[Action]:
        self._wanted = step
        if self._round is not None:
            return self._train(groups) if self._round.complete else []
        return self._start(groups)

    def finished(self, group: str, accepted: bool) -> list[Action]:
        if self._round is None:
            return []
        actions = self._round.finished(group, accepted)
        if self._wanted is None or not self._round.complete:
            return actions
        return actions + self._train(self._round.size)

    def certain(self) -> list[str]:
        return self._round.certain if self._round and self._wanted is not None else []

    def _start(self, groups: int) -> list[Action]:
        self._round = Round(groups, self._stream.admit, 1.0, self.max_admitted)
        return self._round.fill()

    def _train(self, groups: int) -> list[Action]:
        actions = self._round.close(self._wanted)
        self._wanted = None
        return actions + self._start(groups)

    def snapshot(self) -> dict[str, Any]:
        return self._stream.snapshot(self._round.groups if self._round else ())

    def restore(self, state: dict[str, Any]) -> None:
        self._stream.restore(state)
        self._round, self._wanted = None, None
