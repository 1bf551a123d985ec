"""RollPacker (arXiv 2509.21009): tail batching. Long trajectories have rounds of their own."""

from __future__ import annotations

from functools import partial

from rose.policies.batches import Round, check
from rose.policies.verl import Synchronous
from rose.scheduler.events import Action


class TailBatching(Synchronous):
    """Synchronous, in short and long rounds (RollPacker, arXiv 2509.21009, section 4.1).

    A short round starts `speculation` (the paper's eta) times the groups wanted and takes the first
    accepted ones; each of them starts `spare` of its trajectories more and takes the first that are
    in: a race that long ones lose. Groups still running are cancelled, and their prompts go to the
    long queue. A step that finds a whole batch in that queue is a long round: the longest-waiting
    prompts, none more than needed, and all are waited for. So every prompt is trained, and few
    rounds see the tail. In both, a group that the filter refuses is replaced (in a long round from
    the queue, then by a new prompt), up to `max_admitted` times the batch.

    The paper's eta is 1.25, for prompts and responses alike. A cancelled prompt begins anew, with
    the version of its long round: the policy stays on-policy. Live: nothing is missing; engines end
    cancelled turns at once.
    """

    def __init__(self, speculation: float, spare: float, max_admitted: float) -> None:
        super().__init__(max_admitted)
        check(max_admitted, speculation=speculation)
        if not spare >= 0:
            raise ValueError(f"spare={spare:g}: share of a group's trajectories, 0 or more")
        # what is put back into the stream is the long queue
        self.speculation, self.spare = (speculation, spare)

    def begin(self, step: int, groups: int) -> list[Action]:
        self._step = step
        if self._stream.waiting >= groups:
            self._round = Round(groups, self._stream.admit, 1.0, self.max_admitted)
        else:
            self._round = Round(
                groups,
                partial(self._stream.admit_new, self.spare),
                self.speculation,
                self.max_admitted,
            )
        return self._round.fill()

    def _over(self, done: Round) -> None:
        for late in done.open:
            self._stream.put_back(late)
