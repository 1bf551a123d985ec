"""RollArt's trajectory-level asynchrony."""

from __future__ import annotations

from rose.scheduler.batching.asynchronous import Asynchronous
from rose.scheduler.events import Action
from rose.scheduler.groups import group_retry


class TrajectoryAsync(Asynchronous):
    """Environments roll out without a break, and what is too old is aborted (RollArt, arXiv
    2512.22560, trajectory-level asynchrony with its asynchronous bound alpha; ROLL's
    `async_generation_ratio`).

    As many groups run as a batch has, and when one has finished the next is admitted at once, also
    while the trainer trains, up to 1 + alpha batches that run or lie in the sample buffer. A step
    takes the oldest finished groups and waits for none that runs. When version n is published,
    groups admitted under a version older than n - alpha are aborted, running or finished, so that
    none is staler than alpha. An aborted prompt begins anew, at most `retries` times; then it is
    dropped for good, or a prompt that never ends in time would hold its place for ever.

    alpha=1 is the paper's setting. It bounds single trajectories, here the group that they are
    trained in is what is bounded and aborted. `retries` is ours. Live: as in `bounded_staleness`;
    engines end aborted turns at once.
    """

    def __init__(self, alpha: int, retries: int, max_admitted: float) -> None:
        if alpha < 1 or retries < 0:
            raise ValueError(
                f"alpha={alpha}, retries={retries}: at least 1 version (0 would be "
                "scheduler/batching=synchronous), and 0 or more tries"
            )
        super().__init__(alpha, max_admitted)
        self.retries = retries

    def _has_room(self) -> bool:
        return len(self._running) < self._groups and super()._has_room()

    def _expire(self, group: str) -> Action:
        return super()._expire(group) if group_retry(group) < self.retries else self._drop(group)
