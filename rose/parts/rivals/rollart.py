"""RollArt (arXiv 2512.22560): hardware affinity, and bounded trajectory-level asynchrony."""

from __future__ import annotations

from rose.policies.asynchronous import Asynchronous
from rose.scheduler.events import Action
from rose.scheduler.fleet import Fleet
from rose.scheduler.groups import group_retry
from rose.scheduler.state import Cluster, TurnState, WorkerState


class RollArt:
    """Send the turns of a domain to the GPUs that suit them, or to others if those are full
    (RollArt, arXiv 2512.22560, hardware-affinity workload mapping).

    Prefill-heavy domains (many turns, short outputs) suit devices with much compute. Decode-heavy
    domains (few turns, long outputs) suit devices with much memory bandwidth per cost. As in the
    paper, the user declares the hardware: `hardware` maps a domain (`TurnRequested.domain`) to
    hardware (`WorkerJoined.hardware`), and `default` is for all other domains; "" means any. The
    paper maps prefill-heavy to H800 and decode-heavy to H20. On the chosen hardware the worker with
    the trajectory's cached prefix comes first.
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
    """Roll out without a break, and abort groups that are too old (RollArt, arXiv 2512.22560,
    trajectory-level asynchrony with its asynchronous bound alpha; ROLL's `async_generation_ratio`).

    As many groups run as a batch has. When one finishes the next is admitted at once, also while
    the trainer trains, up to 1 + alpha batches that run or wait in the sample buffer. A step takes
    the oldest finished groups and waits for no running one. When version n is published, groups
    admitted before version n - alpha are aborted, running or finished, so that none is staler than
    alpha. An aborted prompt starts again, at most `retries` times. Then it is dropped, because a
    prompt that never ends in time would hold its place forever.

    alpha=1 is the paper's setting. The paper bounds single trajectories; here the whole group is
    bounded and aborted. `retries` is ours. Live: as in `bounded_staleness`; engines abort the turns
    at once.
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
