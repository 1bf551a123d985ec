"""ROSE's turn-wise routing."""

from __future__ import annotations

from rose.scheduler.events import Event, TrajectoryEnded, WorkerJoined, WorkerLost
from rose.scheduler.fleet import Fleet
from rose.scheduler.state import Cluster, TurnState, WorkerState


SLACK = 0.25  # a worker's share of its KV may exceed the mean by so much of the mean before trajectories leave it


class Rose:
    """Each turn is placed anew (ROSE, arXiv 2605.06534, the elastic rollout scheduler):

    1. the worker that has the trajectory's prefix cached, while it has room;
    2. an SLO-safe cooperative worker: nothing was taken back from it, and it is lent enough KV for the turn;
    3. the least loaded worker;
    4. none: the turn waits.

    A worker holds no more trajectories than their KV need fits in what it has now (the per-GPU cap): that of a
    trajectory is the context and output limit of its last turn, and it counts while its tools run, since its prefix
    stays cached. A trajectory that has begun is never stopped by the cap, or its work would lie idle.
    Ours, where the text is open: 2 comes before 3 only while the cooperative worker holds no larger a share of its KV
    than the least loaded worker does, or dedicated engines would idle while cooperative ones fill; and 1 ends where a
    worker's share is above the mean by more than SLACK, or workers that come a second after a step's begin would stay
    without trajectories until the next.
    """

    def __init__(self) -> None:
        self._need: dict[str, dict[str, int]] = {}  # worker -> trajectory -> KV tokens
        self._held: dict[str, int] = {}  # worker -> sum of these
        self._where: dict[str, str] = {}  # trajectory -> worker
        self._all = 0  # sum of `_held`
        self._kv, self._look_in = 1, 0  # KV tokens of all ready workers, and decisions until it is summed anew

    def heard(self, event: Event, cluster: Cluster) -> list:
        match event:
            case TrajectoryEnded(trajectory=trajectory):
                self._leave(trajectory)
            case WorkerJoined(worker=worker) | WorkerLost(worker=worker):
                for trajectory in list(self._need.get(worker, ())):
                    self._leave(trajectory)
        return []

    def choose(self, turn: TurnState, fleet: Fleet, cluster: Cluster) -> WorkerState | None:
        home = fleet.get(cluster.home.get(turn.trajectory, ""), turn)
        worker = home if home is not None and not self._crowded(home, turn, fleet) else self._place(turn, fleet) or home
        if worker is not None:
            self._settle(turn, worker.worker)
        return worker

    def lane(self, turn: TurnState) -> bool:
        """A trajectory that the cap lets wait holds up none that has begun."""
        return turn.trajectory in self._where

    def _place(self, turn: TurnState, fleet: Fleet) -> WorkerState | None:
        least = fleet.least(turn)
        lent = fleet.least(turn, kind="cooperative")
        begun = turn.trajectory in self._where
        if lent is not None and not lent.revoked and (begun or self._below_cap(turn, lent)) \
                and (least is None or self._share(lent) <= self._share(least)):
            return lent
        return least if least is None or begun or self._below_cap(turn, least) else None

    def _below_cap(self, turn: TurnState, worker: WorkerState) -> bool:
        held = self._held.get(worker.worker, 0)
        return held == 0 or held + turn.kv_need <= worker.kv_tokens

    def _crowded(self, worker: WorkerState, turn: TurnState, fleet: Fleet) -> bool:
        """Whether the worker's other trajectories alone need so large a share."""
        self._look_in -= 1
        if self._look_in < 0:  # once per as many decisions as there are workers: O(1) each
            self._look_in, self._kv = len(fleet), max(1, sum(w.kv_tokens for w in fleet))
        mine = self._need.get(worker.worker, {}).get(turn.trajectory, 0)
        return self._held.get(worker.worker, 0) - mine > (1 + SLACK) * worker.kv_tokens * self._all / self._kv

    def _share(self, worker: WorkerState) -> float:
        return self._held.get(worker.worker, 0) / worker.kv_tokens

    def _settle(self, turn: TurnState, worker: str) -> None:
        self._leave(turn.trajectory)
        self._where[turn.trajectory] = worker
        self._need.setdefault(worker, {})[turn.trajectory] = turn.kv_need
        self._held[worker] = self._held.get(worker, 0) + turn.kv_need
        self._all += turn.kv_need

    def _leave(self, trajectory: str) -> None:
        worker = self._where.pop(trajectory, None)
        if worker is not None:
            need = self._need[worker].pop(trajectory)
            self._held[worker] -= need
            self._all -= need
