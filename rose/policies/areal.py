"""AReaL (arXiv 2505.24298): asynchronous training that bounds staleness by bounding admission."""

from __future__ import annotations

from rose.policies.asynchronous import Asynchronous


class BoundedStaleness(Asynchronous):
    """Fully asynchronous; admission bounds staleness (AReaL, arXiv 2505.24298, section 5.1).

    A group is admitted while both conditions hold:
    1. floor((N_r - 1) / B) <= i + eta, with N_r the groups admitted so far (without refused ones),
       B the groups of a batch, and i the newest version, counted from 0. So at most eta + 1 batches
       are admitted and not published, the one in the trainer included.
    2. Fewer than `running` batches of groups run, so that a group's first tokens are generated with
       about the version of its admission. AReaL's code uses 1 (`max_concurrent_rollouts`, by
       default the batch size).

    A step trains on the oldest finished groups as soon as they make a batch. With this rule alone,
    newer groups could overtake a slow group until its staleness exceeds eta. So a complete batch
    waits if later batches could not train all remaining groups in time. The bound on admission
    ensures that this is possible for all groups: none is dropped for its age. eta=0 is synchronous.

    AReaL uses eta=4 for code and 8 for mathematics, with the decoupled objective
    (`algorithm=decoupled_ppo`). In a live run, publishing a version interrupts the running turns,
    which continue with it. AReaL computes their KV again, which is `transfer.in_flight=recompute`.
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
        """True if both conditions for admitting a group hold."""
        may_run = len(self._running) < self._groups * self.running
        untrained = len(self._admitted) + self._training
        return may_run and untrained < self._groups * (1 + self.staleness)

    def _must_wait(self) -> bool:
        """True if, after this batch, the remaining groups could not all meet their deadlines. For
        each version v, the remaining groups of versions up to v must fit into the batches up to
        v + eta."""
        taken = left = 0
        for group, version in self._admitted.items():  # oldest first
            if group in self._accepted and taken < self._groups:
                taken += 1
            elif group not in self._refused and version < self._version:
                left += 1
                if left > (version + self.staleness - self._version) * self._groups:
                    return True
        return False
