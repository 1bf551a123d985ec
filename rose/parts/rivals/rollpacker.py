"""RollPacker (arXiv 2509.21009): tail batching, with separate rounds for long trajectories."""

from __future__ import annotations

from functools import partial

from rose.policies.batches import Round, check
from rose.policies.verl import Synchronous
from rose.scheduler.events import Action


class TailBatching(Synchronous):
    """Synchronous steps of two kinds (RollPacker, arXiv 2509.21009, section 4.1).

    1. A short round starts `speculation` (the paper's eta) times the wanted groups and takes those
       accepted first. Each group starts the share `spare` of its trajectories in addition and takes
       the trajectories that end first. Groups still running at the end are cancelled, and their
       prompts go to the long queue.
    2. A step that finds a whole batch in the long queue is a long round. It starts as many prompts
       as needed, those that waited longest, and waits for all.

    So every prompt is trained, and few rounds have a tail. In both, a refused group is replaced (in
    a long round from the queue, then by a new prompt), up to `max_admitted` times the batch.

    The paper's eta is 1.25, for prompts and responses alike. A cancelled prompt starts again with
    the version of its long round, so training stays on-policy. Live runs support all of it; engines
    abort cancelled turns at once.
    """

    def __init__(self, speculation: float, spare: float, max_admitted: float) -> None:
        super().__init__(max_admitted)
        check(max_admitted, speculation=speculation)
        if not spare >= 0:
            raise ValueError(f"spare={spare:g}: share of a group's trajectories, 0 or more")
        self.speculation, self.spare = speculation, spare

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

    def _before_close(self, done: Round) -> None:
        for late in done.open:
            self._stream.put_back(late)  # The prompts put back are the long queue.
