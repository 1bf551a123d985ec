"""ROSE (arXiv 2605.06534): turn-wise routing, and provisioning of cooperative workers."""

from __future__ import annotations

import math

from rose.policies.speeds import Lengths, Speeds
from rose.scheduler.events import (
    Action,
    Event,
    GroupFinished,
    RestWorker,
    StepBegun,
    TrajectoryEnded,
    UseWorker,
    WorkerCapacity,
    WorkerJoined,
    WorkerLost,
)
from rose.scheduler.fleet import Fleet
from rose.scheduler.state import Cluster, TurnState, WorkerState

# a turn leaves its prefix, or the worker that it runs on, for one that saves more than this share
SLACK = 0.25
FEW = 2  # turns of a borrowed worker of which nothing has been measured
TRIAL_TOKENS = 128  # after which a turn of such a worker is placed anew: then its pace is known
PATIENCE = 16  # decisions for which a lane that waits is not asked again


class RoseRouting:
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

    def on_event(self, event: Event, cluster: Cluster) -> None:
        self._speeds.on_event(event, cluster)
        self._lengths.on_event(event, cluster)
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
        worker with its own device, none that has its prefix on a cooperative worker; and none of
        training one of an evaluation, to which the cap doesn't apply."""
        if turn.held_out:
            return "held_out"
        where = self._where.get(turn.trajectory)
        return "new" if where is None else "lent" if where in self._lent else "own"

    def _place(self, turn: TurnState, home: WorkerState | None, fleet: Fleet) -> WorkerState | None:
        others = fleet.least_of_each(turn)
        if any(w.revoked for w in others):
            lent = fleet.least(turn, kind="cooperative")  # a safe one, if there is any
            others = [w for w in others if not w.revoked] + ([] if lent is None else [lent])
        where = self._where.get(turn.trajectory)
        begins = where is None or where in self._lent and home is not None
        if begins and not turn.held_out:
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
        token_s, silent = self._speeds.token_s(turn), at - turn.progress_at
        if token_s is not None:
            return max(
                token_s * left,
                silent if silent > 2 * (turn.progress_at - turn.assigned_at) else 0.0,
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
        # those of evaluations, which make way turn by turn, count for nothing
        need = 0 if turn.held_out else max(turn.kv_need, int(self._lengths.final))
        self._need.setdefault(name, {})[turn.trajectory] = need
        self._held[name] = self._held.get(name, 0) + need

    def _leave(self, trajectory: str) -> None:
        worker = self._where.pop(trajectory, None)
        if worker is not None:
            self._held[worker] -= self._need[worker].pop(trajectory)


class RoseProvisioning:
    """At most `n_serving` cooperative workers are used at a time, those first whose online server
    has held the least KV of late (ROSE, arXiv 2605.06534, cooperative provisioning).

    KV use is 1 - kv_tokens / whole_kv_tokens, averaged with weights that fall by 1/e each
    `recent_s`. When training begins, it chooses anew for the next step: activation is over, and the
    new version there, when that begins; one that is used gives way only to one whose use is lower
    by more than `hysteresis`. Within a step a worker is added (one joined, or one was lost) only if
    that pays: activation takes `activation_s` (weights, KV pages), and one more worker beside n
    saves at most 1/(n + 1) of what is left of the step, which is guessed from the steps before
    (exponential mean). One without a turn for `idle_s` is given back when fewer turns are left than
    workers: the tail needs no more of them. A serving GPU lends itself to one training job at a
    time: its executor joins one coordinator, so that what has joined here is lent to no other job.
    The paper names cap, ranking and the one job per GPU; the numbers of `conf` are ours.
    """

    def __init__(
        self, n_serving: int, recent_s: float, hysteresis: float, activation_s: float, idle_s: float
    ) -> None:
        if n_serving < 0:
            raise ValueError(f"n_serving={n_serving} must not be negative")
        for name, value in (
            ("recent_s", recent_s),
            ("hysteresis", hysteresis),
            ("activation_s", activation_s),
            ("idle_s", idle_s),
        ):
            if not value >= 0:
                raise ValueError(f"{name}={value} must not be negative")
        self.n_serving, self.recent_s, self.hysteresis = n_serving, recent_s, hysteresis
        self.activation_s, self.idle_s = activation_s, idle_s
        self._use: dict[str, RecentMean] = {}
        self._busy_at: dict[str, float] = {}
        self._chosen = False  # for the step that comes
        self._begun: float | None = None
        self._step_s = math.inf  # mean; nothing is known in the first step

    def joins_resting(self, kind: str) -> bool:
        return kind == "cooperative"

    def on_event(self, event: Event, cluster: Cluster) -> list[Action]:
        match event:
            case WorkerJoined(at=at, worker=name, kind="cooperative"):
                self._use[name] = RecentMean(at, 0.0)
            case WorkerLost(worker=name):
                self._use.pop(name, None)
                self._busy_at.pop(name, None)
            case WorkerCapacity(at=at, worker=name) if name in self._use:
                self._use[name].put(at, kv_use(cluster.workers[name]), self.recent_s)
            case GroupFinished(at=at) if cluster.training and not self._chosen:
                self._chosen = True
                return self._choose(at, cluster)
            case StepBegun(at=at):
                self._learn(at)
                chosen, self._chosen = self._chosen, False
                return [] if chosen else self._choose(at, cluster)
        return []

    def decide(self, at: float, cluster: Cluster) -> list[Action]:
        used = [w for w in self._lent(cluster) if not w.resting]
        for worker in used:
            if worker.turns:
                self._busy_at[worker.worker] = at
        if self._begun is None or cluster.training:
            return []
        there = sum(not _asleep(w) for w in cluster.workers.values())
        if len(cluster.turns) < there:
            return [
                RestWorker(w.worker)
                for w in used
                if at - self._busy_at.get(w.worker, at) >= self.idle_s
            ]
        left = max(self._step_s - (at - self._begun), 0.0)
        others = sorted(
            (w for w in self._lent(cluster) if w.resting), key=lambda w: self._rank(at, w)
        )
        n = there - len(others)
        pays = (
            i for i in range(self.n_serving - len(used)) if left / (n + i + 1) > self.activation_s
        )
        return [self._activate(at, worker) for worker, _ in zip(others, pays, strict=False)]

    def _choose(self, at: float, cluster: Cluster) -> list[Action]:
        ranked = sorted(self._lent(cluster), key=lambda w: self._rank(at, w))
        return [
            *(RestWorker(w.worker) for w in ranked[self.n_serving :] if not w.resting),
            *(self._activate(at, w) for w in ranked[: self.n_serving] if w.resting),
        ]

    def _activate(self, at: float, worker: WorkerState) -> Action:
        self._busy_at[worker.worker] = at
        return UseWorker(worker.worker)

    def _rank(self, at: float, worker: WorkerState) -> tuple[float, str]:
        use = self._use[worker.worker].at(at, self.recent_s)
        return use - (0.0 if worker.resting else self.hysteresis), worker.worker

    def _lent(self, cluster: Cluster) -> list[WorkerState]:
        return [cluster.workers[name] for name in self._use if name in cluster.workers]

    def _learn(self, at: float) -> None:
        if self._begun is not None:
            took = at - self._begun
            self._step_s = took if math.isinf(self._step_s) else (self._step_s + took) / 2
        self._begun = at


def _asleep(worker: WorkerState) -> bool:
    """Its GPUs are another engine's now."""
    return worker.resting and worker.shape is not None


def kv_use(worker: WorkerState) -> float:
    """Share of its KV memory that a cooperative worker is not lent: the online server's use, and
    what it reserves."""
    return 1 - worker.kv_tokens / worker.whole_kv_tokens if worker.whole_kv_tokens else 1.0


class RecentMean:
    """Exponential mean over time of a value that holds until the next one is put."""

    def __init__(self, at: float, value: float) -> None:
        self._since, self._at, self._value, self._mean = at, at, value, value

    def at(self, at: float, recent_s: float) -> float:
        weight = math.exp(-(at - self._at) / recent_s) if recent_s else 0.0
        return self._value + (self._mean - self._value) * weight

    def put(self, at: float, value: float, recent_s: float) -> None:
        self._mean = self.at(at, recent_s) if at > self._since else value
        self._at, self._value = at, value
