"""AReaL (arXiv 2505.24298): asynchronous, with staleness bounded by what is admitted."""

from __future__ import annotations

from rose.policies.asynchronous import Asynchronous


class BoundedStaleness(Asynchronous):
    """Fully asynchronous, with staleness bounded by what is admitted (AReaL, arXiv 2505.24298,
    section 5.1).

    A group is admitted while floor((N_r - 1) / B) <= i + eta, with N_r the groups admitted so far
    (refused ones taken off), B those of a batch, and i the newest version, counted from 0: as many
    as eta + 1 batches are out, one in the trainer included until its version is published. And no
    more than `running` batches of groups run at once, so that a group's version is about that of
    its first tokens: 1 in AReaL's code (`max_concurrent_rollouts`, which is the batch's size if not
    given). A step trains on the oldest finished groups as soon as they make a batch. The rule alone
    lets a slow group be overtaken for ever, and so exceed eta. Here a batch waits if otherwise more
    groups would be left with some version as their last than the steps until then can train; by the
    rule they always can be trained in time, and nothing is ever dropped for its age. eta=0 is
    synchronous.

    eta is 4 in AReaL's code experiments (8 in its mathematics ones), with the decoupled objective
    (`algorithm=decoupled_ppo`). Live: turns in flight when a version comes are interrupted and go
    on with it (`transfer.in_flight=recompute` is AReaL's way: the KV of what was made is computed
    anew).
    """

    def __init__(self, eta: int, running: float, max_admitted: float) -> None:
        if eta < 0:
            raise ValueError(f"eta={eta}: versions, 0 (synchronous) or more")
        if not running > 0:
            raise ValueError(
                f"running={running:g}: batches of groups that run at once, more than 0"
            )
        super().__init__(eta, max_admitted)
        self.running = running

    def _has_room(self) -> bool:
        return len(self._running) < self._groups * self.running and len(
            self._admitted
        ) + self._training < self._groups * (1 + self.staleness)

    def _must_wait(self) -> bool:
        """Earliest deadline first: of the groups admitted by a version, those that this batch
        leaves over must fit into the batches up to that version + eta."""
        taken = left = 0
        for version in range(self._version - self.staleness, self._version):
            ready = self._accepted_of[version]
            taking = min(ready, self._groups - taken)
            taken += taking
            left += self._running_of[version] + ready - taking
            if left > (version + self.staleness - self._version) * self._groups:
                return True
        return False
