"""Long trajectories have rounds of their own."""

from __future__ import annotations

from functools import partial
from typing import Any

from rose.scheduler.batching.round import Round, check
from rose.scheduler.batching.stream import Stream
from rose.scheduler.events import Action


class TailBatching:
    """Synchronous, in short and long rounds (RollPacker, arXiv 2509.21009, section 4.1).

    A short round starts `speculation` (the paper's eta) times the groups wanted and takes the first accepted ones; each
    of them starts `spare` of its trajectories more and takes the first that are in: a race that long ones lose. Groups still running are cancelled, and their prompts go to the long queue. A step
    that finds a whole batch in that queue is a long round: the longest-waiting prompts, none more than needed, and all
    are waited for. So every prompt is trained, and few rounds see the tail. In both, a group that the filter refuses is
    replaced (in a long round from the queue, then by a new prompt), up to `max_admitted` times the batch.

    The paper's eta is 1.25, for prompts and responses alike. A cancelled prompt begins anew, with the version of its
    long round: the policy stays on-policy. Live: nothing is missing; engines end cancelled turns at once.
    """

    staleness = 0

    def __init__(self, speculation: float, spare: float, max_admitted: float) -> None:
        check(max_admitted, speculation=speculation)
        if not spare >= 0:
            raise ValueError(f"spare={spare:g}: share of a group's trajectories, 0 or more")
        self.speculation, self.spare, self.max_admitted = speculation, spare, max_admitted
        self._stream = Stream()  # what is put back is the long queue
        self._step = 0
        self._round: Round | None = None

    def begin(self, step: int, groups: int) -> list[Action]:
        self._step = step
        if self._stream.waiting >= groups:
            self._round = Round(groups, self._stream.admit, 1.0, self.max_admitted)
        else:
            self._round = Round(groups, partial(self._stream.admit_new, self.spare), self.speculation,
                                self.max_admitted)
        return self._round.fill()

    def finished(self, group: str, accepted: bool) -> list[Action]:
        if self._round is None:
            return []
        actions = self._round.finished(group, accepted)
        if not self._round.complete:
            return actions
        done, self._round = self._round, None
        for late in done.open:
            self._stream.put_back(late)
        return actions + done.close(self._step)

    def snapshot(self) -> dict[str, Any]:
        return self._stream.snapshot(self._round.groups if self._round else ())

    def restore(self, state: dict[str, Any]) -> None:
        self._stream.restore(state)
        self._round = None
