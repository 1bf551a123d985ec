"""ROSE's turn-wise routing."""

from __future__ import annotations

import math

from rose.scheduler.events import Event, TrajectoryEnded, WorkerJoined, WorkerLost
from rose.scheduler.fleet import Fleet
from rose.scheduler.routing.lengths import Lengths
from rose.scheduler.routing.speeds import Speeds
from rose.scheduler.state import Cluster, TurnState, WorkerState

# a turn leaves its prefix, or the worker that it runs on, for one that saves more than this share
SLACK = 0.25
FEW = 2  # turns of a borrowed worker of which nothing has been measured
TRIAL_TOKENS = 128  # after which a turn of such a worker is placed anew: then its pace is known
PATIENCE = 16  # decisions for which a lane that waits is not asked again


class Rose:
    """Each turn is placed anew (ROSE, arXiv 2605.06534, the elastic rollout scheduler):

    1. the worker that has the trajectory's prefix cached, while it has room;
    2. an SLO-safe cooperative worker: nothing was taken back from it, and it is lent enough KV for
      the turn;
    3. the least loaded worker;
    4. none: the turn waits.

    A worker holds no more trajectories than their KV need fits in what it has now (the per-GPU
    cap): that of a trajectory is the context and output limit of its last turn, and it counts while
    its tools run, since its prefix stays cached; once trajectories have ended, at least their mean
    context at the end. A trajectory that has begun is never stopped by the cap, or its work would
    lie idle; but from a cooperative worker it goes to another below the cap only, as a new one
    would: else what begins on lent devices evicts the prefixes of those with their own. Ours, where
    the text is open: the seconds until the turn ends (`Speeds`) choose between 2 and 3, end 1 where
    they are fewer elsewhere by SLACK, and decide for 4 where 2 ends later than waiting for a worker
    with its own device. A cooperative worker of which nothing has been measured gets FEW turns,
    each placed anew after TRIAL_TOKENS; once one like it has been measured, turns only for which
    others have no room. A turn on a cooperative worker keeps its place in the queue: when a worker
    with its own device gets free, and at ticks, it moves there if what is left of it (a mean turn,
    at the measured pace) takes longer than that, prefill, and what the turns there wait for it, by
    up to SLACK as that worker is loaded.
    """

    def __init__(self) -> None:
        self._need: dict[str, dict[str, int]] = {}  # worker -> trajectory -> KV tokens
        self._held: dict[str, int] = {}  # worker -> sum of these
        self._where: dict[str, str] = {}  # trajectory -> worker
        self._speeds, self._lengths = Speeds(), Lengths()
        # a worker with its own device, and the sequences of all such
        self._own, self._places = ("", 0)
        self._look_in = 0  # decisions until they are looked at anew
        self._lent: set[str] = set()  # cooperative workers
        self._patience: dict[
            str, int
        ] = {}  # lane -> decisions until it is asked again whether waiting pays
        self._all_wait = False  # those of the lane that was asked about last

    def heard(self, event: Event, cluster: Cluster) -> None:
        self._speeds.heard(event, cluster)
        self._lengths.heard(event, cluster)
        match event:
            case TrajectoryEnded(trajectory=trajectory):
                self._leave(trajectory)
            case WorkerJoined(worker=worker) | WorkerLost(worker=worker):
                self._lent.discard(worker)
                if isinstance(event, WorkerJoined) and self.watches(cluster.workers[worker]):
                    self._lent.add(worker)
                for trajectory in list(self._need.get(worker, ())):
                    self._leave(trajectory)

    def choose(self, turn: TurnState, fleet: Fleet, cluster: Cluster) -> WorkerState | None:
        self._all_wait = False
        if self._patience.get(turn.lane, 0) and self._own_are_full(turn, fleet, cluster):
            self._patience[turn.lane] -= 1
            self._all_wait = True
            return None
        home = fleet.get(cluster.home.get(turn.trajectory, ""), turn)
        worker = self._place(turn, home, fleet)
        if (
            worker is not None
            and self.watches(worker)
            and self._own_are_full(turn, fleet, cluster)
            and (self._waits(turn, worker, cluster))
        ):
            self._patience[turn.lane] = PATIENCE
            self._all_wait = True
            return None
        if worker is not None:
            self._settle(turn, worker, worker is home)
        return worker

    def closed(self) -> bool:
        return self._all_wait

    def lane(self, turn: TurnState) -> str:
        """A trajectory that the cap lets wait holds up none that has begun; one that waits for a
        worker with its own device, none that has its prefix on a cooperative worker."""
        where = self._where.get(turn.trajectory)
        return "new" if where is None else "lent" if where in self._lent else "own"

    def _place(self, turn: TurnState, home: WorkerState | None, fleet: Fleet) -> WorkerState | None:
        others = fleet.least_of_each(turn)
        if any(w.revoked for w in others):
            lent = fleet.least(turn, kind="cooperative")  # a safe one, if there is any
            others = [w for w in others if not w.revoked] + ([] if lent is None else [lent])
        where = self._where.get(turn.trajectory)
        if where is None or where in self._lent and home is not None:
            others = [worker for worker in others if self._below_cap(turn, worker)]
        if not others:
            return home
        worker = others[0] if len(others) == 1 else min(others, key=lambda w: self._rank(turn, w))
        if home is None or worker is home:
            return worker
        mine = self._speeds.seconds(turn, home, self._mean(turn), True)
        its = self._speeds.joining_s(turn, worker, self._mean(turn), True)
        return home if mine is None or its is None or mine <= (1 + SLACK) * its else worker

    def _own_are_full(self, turn: TurnState, fleet: Fleet, cluster: Cluster) -> bool:
        """Whether workers with their own devices have turns, and no place."""
        self._look_in -= 1
        if self._look_in < 0:  # once per as many decisions as there are workers: O(1) each
            own = [w for w in fleet if not self.watches(w)]
            self._look_in, self._places = len(fleet), sum(w.max_sequences for w in own)
            self._own = own[0].worker if own else ""
        own = cluster.workers.get(self._own)
        return own is not None and len(own.turns) > 0 and fleet.least(turn, kind=own.kind) is None

    def _waits(self, turn: TurnState, worker: WorkerState, cluster: Cluster) -> bool:
        """Whether the turn ends sooner by waiting for a place at a worker with its own device than
        on `worker`."""
        if not self._is_known(worker):
            return len(worker.turns) >= FEW
        own, home, output = (
            cluster.workers[self._own],
            cluster.home.get(turn.trajectory),
            self._mean(turn),
        )
        there = (
            self._speeds.staying_s(turn, worker, output)
            if home == worker.worker
            else self._speeds.joining_s(turn, worker, output, False)
        )
        here = (
            self._speeds.staying_s(turn, own, output)
            if turn.lane == "own"
            else self._speeds.joining_s(turn, own, output, False)
        )
        return (
            None not in (here, there) and here * (1 + (1 + cluster.waiting) / self._places) < there
        )

    def _rank(self, turn: TurnState, worker: WorkerState) -> tuple:
        seconds = self._speeds.joining_s(turn, worker, self._mean(turn), True)
        if not self._is_known(worker):
            seconds = 0.0 if seconds is None and len(worker.turns) < FEW else math.inf
        return (
            worker.revoked,
            seconds or 0.0,
            self._share(worker),
            worker.kind != "cooperative",
            worker.worker,
        )

    def _mean(self, turn: TurnState) -> float:
        """Tokens of a turn of its domain; until one has ended, of any."""
        return self._lengths.of_any(turn)

    def chunk(self, turn: TurnState, worker: WorkerState) -> int:
        return 0 if self._is_known(worker) else TRIAL_TOKENS

    def _is_known(self, worker: WorkerState) -> bool:
        return worker.kind != "cooperative" or self._speeds.knows(worker)

    # ----------------------------------------------------------------- turns that run

    def watches(self, worker: WorkerState) -> bool:
        """Others have their devices to themselves."""
        return worker.kind == "cooperative"

    def better(
        self, turn: TurnState, among: list[WorkerState], at: float, cluster: Cluster
    ) -> WorkerState | None:
        left = min(self._mean(turn), turn.max_new_tokens - turn.made_tokens)
        if left <= 0 or at <= turn.assigned_at:
            return None
        here = cluster.workers[turn.worker]
        found, most = None, self._rest(turn, here, left, at)
        over = self._overestimated(turn, here, left)
        for worker in among:
            if (
                self.watches(worker)
                or len(worker.turns) >= worker.max_sequences
                or not self._below_cap(turn, worker)
            ):
                continue  # into an engine's queue it would move for nothing
            there = self._speeds.joining_s(turn, worker, left, False)
            if there is not None and (there := there * over * (1 + SLACK * worker.load)) < most:
                found, most = worker, there
        if found is not None:
            self._speeds.moved(turn, here)
            self._settle(turn, found, False)
        return found

    def _overestimated(self, turn: TurnState, here: WorkerState, left: float) -> float:
        """At most 1: what was measured of the running turn over what is expected of it here. The
        contexts of long turns are beyond those that the fit has seen, and what it makes of them
        here it does of them elsewhere."""
        token_s, expected = self._speeds.token_s(turn), self._speeds.staying_s(turn, here, left)
        return 1.0 if token_s is None or expected <= 0 else min(1.0, token_s * left / expected)

    def _rest(self, turn: TurnState, here: WorkerState, left: float, at: float) -> float:
        """Seconds until the running turn has made `left` tokens more."""
        token_s, silent = self._speeds.token_s(turn), at - turn.heard_at
        if token_s is not None:
            return max(
                token_s * left, silent if silent > 2 * (turn.heard_at - turn.assigned_at) else 0.0
            )
        if self._is_known(here):
            return self._speeds.staying_s(turn, here, left)
        return silent if len(here.turns) <= FEW else math.inf

    # ----------------------------------------------------------------- what workers hold

    def _below_cap(self, turn: TurnState, worker: WorkerState) -> bool:
        held = self._held.get(worker.worker, 0)
        return held == 0 or held + max(turn.kv_need, int(self._lengths.final)) <= worker.kv_tokens

    def _share(self, worker: WorkerState) -> float:
        return self._held.get(worker.worker, 0) / worker.kv_tokens

    def _settle(self, turn: TurnState, worker: WorkerState, cached: bool) -> None:
        self._speeds.sent(turn, worker, cached)
        self._leave(turn.trajectory)
        name = worker.worker
        self._where[turn.trajectory] = name
        need = max(turn.kv_need, int(self._lengths.final))
        self._need.setdefault(name, {})[turn.trajectory] = need
        self._held[name] = self._held.get(name, 0) + need

    def _leave(self, trajectory: str) -> None:
        worker = self._where.pop(trajectory, None)
        if worker is not None:
            self._held[worker] -= self._need[worker].pop(trajectory)
