"""RollArt (arXiv 2512.22560): hardware affinity, and bounded trajectory-level asynchrony."""

from __future__ import annotations

from rose.policies.asynchronous import Asynchronous
from rose.scheduler.events import Action
from rose.scheduler.fleet import Fleet
from rose.scheduler.groups import group_retry
from rose.scheduler.state import Cluster, TurnState, WorkerState


class RollArt:
    """A domain's turns go to the GPUs that suit them: prefill-heavy ones (many turns, short
    outputs) to devices with much compute, decode-heavy ones (few turns, long outputs) to those with
    much memory bandwidth per cost; to any other if those are full (RollArt, arXiv 2512.22560,
    hardware-affinity workload mapping).

    The user declares it, as in the paper: `hardware` maps a domain (`TurnRequested.domain`) to the
    hardware's name (`WorkerJoined.hardware`), and `default` is for every other domain; "" means
    any. The paper's mapping: prefill-heavy on H800, decode-heavy on H20. On the chosen hardware the
    worker with the trajectory's cached prefix comes first.
    """

    def __init__(self, hardware: dict[str, str], default: str) -> None:
        self.hardware, self.default = dict(hardware), default

    def choose(self, turn: TurnState, fleet: Fleet, cluster: Cluster) -> WorkerState | None:
        wanted = self.hardware.get(turn.domain, self.default)
        home = fleet.get(cluster.home.get(turn.trajectory, ""), turn)
        if home is not None and (not wanted or cluster.workers[home.worker].hardware == wanted):
            return home
        best = fleet.least(turn, hardware=wanted) if wanted else None
        return best or home or fleet.least(turn)


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
