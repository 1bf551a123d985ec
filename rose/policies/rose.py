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

# A turn leaves the worker with its cached prefix if staying takes longer by more than this share.
# For a running turn, the share is multiplied by the other worker's load.
SLACK = 0.25
TRIAL_TURNS = 2  # turns sent to a cooperative worker that hasn't been measured
TRIAL_TOKENS = 128  # tokens of a turn on such a worker, after which its pace is known
PATIENCE = 16  # decisions after which a waiting lane (`RoseRouting.lane`) is checked again


class RoseRouting:
    """Place each turn independently (ROSE, arXiv 2605.06534, the elastic rollout scheduler):

    1. on the worker that has the trajectory's prefix cached, while it has room;
    2. on an SLO-safe cooperative worker: none of its memory was revoked, and it is lent enough KV;
    3. on the least loaded worker;
    4. on none: the turn waits.

    Per-GPU cap: the trajectories of a worker must fit into its current KV. A trajectory counts with
    the larger of two numbers: the context plus output limit of its last turn, and the mean context
    with which trajectories end. It counts while its tools run, too, because its prefix stays
    cached. The cap applies to
    - a new trajectory: it starts only on a worker below its cap;
    - a trajectory that leaves a cooperative worker with room: it moves only to a worker below its
      cap. Otherwise trajectories that start on lent GPUs would evict prefixes of other workers.
    It doesn't apply to other running trajectories, because stopping them would waste their work.

    The paper leaves other points open, where the rules are ours. The predicted seconds until the
    turn ends (`Speeds`) decide between 2 and 3. Case 1 doesn't apply if another worker is faster by
    more than the share SLACK. A turn waits instead of 2 if it ends sooner by waiting for a worker
    with its own device. A cooperative worker without measurements gets TRIAL_TURNS turns of
    TRIAL_TOKENS each, which are then placed again. It comes first if no cooperative worker of its
    hardware was measured, else after all other candidates. Once it has TRIAL_TURNS turns, it comes
    last as well. A turn for which it is still the choice then waits if the workers with their own
    devices are full.

    A turn on a cooperative worker keeps its place in the queue. When a worker with its own device
    gets free, and at ticks, the seconds for its next tokens are predicted, as many as a mean turn
    has but not beyond its limit: t on its own worker, at the measured pace, and t' on the free one,
    with prefill and the delay of the turns there. It moves if t > t' (1 + SLACK x load there).
    """

    def __init__(self) -> None:
        self._need: dict[str, dict[str, int]] = {}  # worker -> trajectory -> KV tokens
        self._held: dict[str, int] = {}  # worker -> sum of its trajectories' KV tokens
        self._worker_of: dict[str, str] = {}  # trajectory -> worker
        self._speeds, self._lengths = Speeds(), Lengths()
        self._own_worker = ""  # a worker with its own device
        self._own_sequences = 0  # sequences of all such workers
        self._count_in = 0  # decisions until these two are determined again
        self._lent: set[str] = set()  # cooperative workers
        self._patience: dict[str, int] = {}  # lane -> decisions until `_waits` is evaluated again
        self._lane_waits = False  # True if the lane of the last turn is to wait

    def on_event(self, event: Event, cluster: Cluster) -> None:
        self._speeds.on_event(event, cluster)
        self._lengths.on_event(event, cluster)
        match event:
            case TrajectoryEnded(trajectory=trajectory):
                self._forget(trajectory)
            case WorkerJoined(worker=worker) | WorkerLost(worker=worker):
                self._lent.discard(worker)
                if isinstance(event, WorkerJoined) and self.watches(cluster.workers[worker]):
                    self._lent.add(worker)
                for trajectory in list(self._need.get(worker, ())):
                    self._forget(trajectory)

    def choose(self, turn: TurnState, fleet: Fleet, cluster: Cluster) -> WorkerState | None:
        self._lane_waits = False
        if self._patience.get(turn.lane, 0) and self._own_are_full(turn, fleet, cluster):
            self._patience[turn.lane] -= 1
            self._lane_waits = True
            return None
        home = fleet.get(cluster.home.get(turn.trajectory, ""), turn)
        worker = self._place(turn, home, fleet)
        if worker is None:
            return None
        may_wait = self.watches(worker) and self._own_are_full(turn, fleet, cluster)
        if may_wait and self._waits(turn, worker, cluster):
            self._patience[turn.lane] = PATIENCE
            self._lane_waits = True
            return None
        self._note_assignment(turn, worker, worker is home)
        return worker

    def closed(self) -> bool:
        """True if the last turn's whole lane is to wait."""
        return self._lane_waits

    def lane(self, turn: TurnState) -> str:
        """Return one of four lanes, by the reason why a turn may wait. Evaluations, to which the
        cap doesn't apply, are "held_out". Trajectories without a worker are "new": they have not
        started, or their worker was lost. Others are "own" or "lent", by the sort of worker that
        has their prefix."""
        if turn.held_out:
            return "held_out"
        where = self._worker_of.get(turn.trajectory)
        return "new" if where is None else "lent" if where in self._lent else "own"

    def _place(self, turn: TurnState, home: WorkerState | None, fleet: Fleet) -> WorkerState | None:
        """Choose between `home`, which has the turn's prefix cached, and other workers."""
        others = fleet.least_of_each(turn)
        if any(w.revoked for w in others):
            lent = fleet.least(turn, kind="cooperative")  # SLO-safe if any is
            others = [w for w in others if not w.revoked] + ([] if lent is None else [lent])
        where = self._worker_of.get(turn.trajectory)
        begins = where is None or where in self._lent and home is not None
        if begins and not turn.held_out:
            others = [worker for worker in others if self._below_cap(turn, worker)]
        if not others:
            return home
        worker = others[0] if len(others) == 1 else min(others, key=lambda w: self._rank(turn, w))
        if home is None or worker is home:
            return worker
        output = self._lengths.of_any(turn)
        home_s = self._speeds.seconds(turn, home, output, True)
        other_s = self._speeds.joining_s(turn, worker, output, True)
        stays = home_s is None or other_s is None or home_s <= (1 + SLACK) * other_s
        return home if stays else worker

    def _own_are_full(self, turn: TurnState, fleet: Fleet, cluster: Cluster) -> bool:
        """True if workers with their own devices have turns and no room for this one."""
        self._count_in -= 1
        if self._count_in < 0:  # once in as many decisions as there are workers: amortized O(1)
            own = [w for w in fleet if not self.watches(w)]
            self._count_in, self._own_sequences = len(fleet), sum(w.max_sequences for w in own)
            self._own_worker = own[0].worker if own else ""
        own = cluster.workers.get(self._own_worker)
        return own is not None and len(own.turns) > 0 and fleet.least(turn, kind=own.kind) is None

    def _waits(self, turn: TurnState, worker: WorkerState, cluster: Cluster) -> bool:
        """True if the turn ends sooner by waiting for a worker with its own device than on the
        cooperative `worker`."""
        if not self._is_known(worker):
            return len(worker.turns) >= TRIAL_TURNS
        own = cluster.workers[self._own_worker]
        home = cluster.home.get(turn.trajectory)
        output = self._lengths.of_any(turn)
        lent_s = (
            self._speeds.staying_s(turn, worker, output)
            if home == worker.worker
            else self._speeds.joining_s(turn, worker, output, False)
        )
        own_s = (
            self._speeds.staying_s(turn, own, output)
            if turn.lane == "own"
            else self._speeds.joining_s(turn, own, output, False)
        )
        if own_s is None or lent_s is None:
            return False
        return own_s * (1 + (1 + cluster.waiting) / self._own_sequences) < lent_s

    def _rank(self, turn: TurnState, worker: WorkerState) -> tuple:
        """Return the sort key of a candidate, the smaller the better."""
        seconds = self._speeds.joining_s(turn, worker, self._lengths.of_any(turn), True)
        # A trial comes first, or last if it is full or its pool (kind, hardware) was measured.
        if not self._is_known(worker):
            seconds = 0.0 if seconds is None and len(worker.turns) < TRIAL_TURNS else math.inf
        return (
            worker.revoked,
            seconds or 0.0,
            self._held.get(worker.worker, 0) / worker.kv_tokens,
            worker.kind != "cooperative",
            worker.worker,
        )

    def chunk(self, turn: TurnState, worker: WorkerState) -> int:
        return 0 if self._is_known(worker) else TRIAL_TOKENS

    def _is_known(self, worker: WorkerState) -> bool:
        """False for a cooperative worker that hasn't been measured."""
        return worker.kind != "cooperative" or self._speeds.has_measured(worker)

    # ----------------------------------------------------------------- turns that run

    def watches(self, worker: WorkerState) -> bool:
        """True for cooperative workers, the only ones that share their device."""
        return worker.kind == "cooperative"

    def better(
        self, turn: TurnState, among: list[WorkerState], at: float, cluster: Cluster
    ) -> WorkerState | None:
        """Return the worker on which the running turn ends clearly sooner; None if none is."""
        left = min(self._lengths.of_any(turn), turn.max_new_tokens - turn.made_tokens)
        if left <= 0 or at <= turn.assigned_at:
            return None
        here = cluster.workers[turn.worker]
        found, most = None, self._remaining_s(turn, here, left, at)
        over = self._overestimated(turn, here, left)
        for worker in among:
            # In an engine's queue the turn would gain nothing.
            is_full = len(worker.turns) >= worker.max_sequences
            if self.watches(worker) or is_full or not self._below_cap(turn, worker):
                continue
            there = self._speeds.joining_s(turn, worker, left, False)
            if there is not None and (there := there * over * (1 + SLACK * worker.load)) < most:
                found, most = worker, there
        if found is not None:
            # The attempt is aborted now. Its time is measured up to its last progress report.
            self._speeds.ended(turn, here, turn.progress_at, turn.made_tokens)
            self._note_assignment(turn, found, False)
        return found

    def _overestimated(self, turn: TurnState, here: WorkerState, left: float) -> float:
        """Return the measured time of the running turn divided by the predicted time, at most 1.

        Long turns have contexts beyond those that were fitted. The fit is assumed to err by the
        same factor on other workers, so their predictions are multiplied by it.
        """
        token_s, expected = self._speeds.token_s(turn), self._speeds.staying_s(turn, here, left)
        return 1.0 if token_s is None or expected <= 0 else min(1.0, token_s * left / expected)

    def _remaining_s(self, turn: TurnState, here: WorkerState, left: float, at: float) -> float:
        """Predict the seconds until the running turn has generated `left` more tokens. A turn that
        has been silent for long is predicted to stay silent as long again."""
        token_s, silent = self._speeds.token_s(turn), at - turn.progress_at
        if token_s is not None:
            is_long = silent > 2 * (turn.progress_at - turn.assigned_at)
            return max(token_s * left, silent if is_long else 0.0)
        if self._is_known(here):
            return self._speeds.staying_s(turn, here, left)
        return silent if len(here.turns) <= TRIAL_TURNS else math.inf

    # ----------------------------------------------------------------- what workers hold

    def _below_cap(self, turn: TurnState, worker: WorkerState) -> bool:
        """True if the worker's KV has room for the turn's trajectory, or holds no other."""
        held = self._held.get(worker.worker, 0)
        return held == 0 or held + max(turn.kv_need, int(self._lengths.final)) <= worker.kv_tokens

    def _note_assignment(self, turn: TurnState, worker: WorkerState, cached: bool) -> None:
        """Count the turn's trajectory on this worker, and on no other."""
        self._speeds.sent(turn, worker, cached)
        self._forget(turn.trajectory)
        name = worker.worker
        self._worker_of[turn.trajectory] = name
        # Evaluation trajectories don't count, because their turns are preempted for training.
        need = 0 if turn.held_out else max(turn.kv_need, int(self._lengths.final))
        self._need.setdefault(name, {})[turn.trajectory] = need
        self._held[name] = self._held.get(name, 0) + need

    def _forget(self, trajectory: str) -> None:
        worker = self._worker_of.pop(trajectory, None)
        if worker is not None:
            self._held[worker] -= self._need[worker].pop(trajectory)


class RoseProvisioning:
    """Use at most `n_serving` cooperative workers at a time, those whose online server has recently
    held the least KV (ROSE, arXiv 2605.06534, cooperative provisioning).

    KV use is 1 - kv_tokens / whole_kv_tokens, averaged with weights that fall to 1/e in
    `recent_s`. The policy changes the workers in use
    1. when training begins, for the next step, so that activation is over when this step begins. A
       worker in use is replaced only by one whose use is lower by more than `hysteresis`;
    2. within a step, while fewer than `n_serving` are in use and another worker pays: it saves more
       than `activation_s`, the time to activate it (weights, KV pages). Beside n workers it saves
       at most 1/(n + 1) of the step's remaining time, by the exponential mean of the last steps;
    3. in the tail: while fewer turns than workers are left, a worker without a turn for `idle_s`
       rests.

    A serving GPU is lent to one training job at a time, because its executor joins one coordinator.
    Cap, ranking and one job per GPU are the paper's; the numbers in `conf` are ours.
    """

    def __init__(
        self, n_serving: int, recent_s: float, hysteresis: float, activation_s: float, idle_s: float
    ) -> None:
        names = "n_serving", "recent_s", "hysteresis", "activation_s", "idle_s"
        values = n_serving, recent_s, hysteresis, activation_s, idle_s
        for name, value in zip(names, values, strict=True):
            if not value >= 0:
                raise ValueError(f"{name}={value} must not be negative")
        self.n_serving, self.recent_s, self.hysteresis = n_serving, recent_s, hysteresis
        self.activation_s, self.idle_s = activation_s, idle_s
        self._use: dict[str, RecentMean] = {}  # cooperative worker -> its KV use
        self._busy_at: dict[str, float] = {}  # worker -> last time it had turns or was activated
        self._chosen = False  # True once the workers for the next step are chosen
        self._begun: float | None = None  # time at which the step began
        self._step_s = math.inf  # mean seconds of a step; infinite until one has ended

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
        awake = sum(not _asleep(w) for w in cluster.workers.values())
        if len(cluster.turns) < awake:
            idle = [w for w in used if at - self._busy_at.get(w.worker, at) >= self.idle_s]
            return [RestWorker(w.worker) for w in idle]
        left = max(self._step_s - (at - self._begun), 0.0)
        others = [w for w in self._lent(cluster) if w.resting]
        others.sort(key=lambda w: self._rank(at, w))
        n = awake - len(others)
        more = range(self.n_serving - len(used))
        pays = (i for i in more if left / (n + i + 1) > self.activation_s)
        return [self._activate(at, worker) for worker, _ in zip(others, pays, strict=False)]

    def _choose(self, at: float, cluster: Cluster) -> list[Action]:
        """Use the `n_serving` cooperative workers that rank first, and let the others rest."""
        ranked = sorted(self._lent(cluster), key=lambda w: self._rank(at, w))
        return [
            *(RestWorker(w.worker) for w in ranked[self.n_serving :] if not w.resting),
            *(self._activate(at, w) for w in ranked[: self.n_serving] if w.resting),
        ]

    def _activate(self, at: float, worker: WorkerState) -> Action:
        self._busy_at[worker.worker] = at
        return UseWorker(worker.worker)

    def _rank(self, at: float, worker: WorkerState) -> tuple[float, str]:
        """Return the sort key: KV use, lowered by `hysteresis` for a worker in use."""
        use = self._use[worker.worker].at(at, self.recent_s)
        return use - (0.0 if worker.resting else self.hysteresis), worker.worker

    def _lent(self, cluster: Cluster) -> list[WorkerState]:
        """Return the cooperative workers."""
        return [cluster.workers[name] for name in self._use if name in cluster.workers]

    def _learn(self, at: float) -> None:
        """Note that a step begins, and update the mean duration of steps."""
        if self._begun is not None:
            took = at - self._begun
            self._step_s = took if math.isinf(self._step_s) else (self._step_s + took) / 2
        self._begun = at


def _asleep(worker: WorkerState) -> bool:
    """True if another engine uses the worker's GPUs now."""
    return worker.resting and worker.shape is not None


def kv_use(worker: WorkerState) -> float:
    """Return the share of a cooperative worker's KV memory that its online server holds."""
    return 1 - worker.kv_tokens / worker.whole_kv_tokens if worker.whole_kv_tokens else 1.0


class RecentMean:
    """Exponential mean over time of a value that is constant between calls of `put`."""

    def __init__(self, at: float, value: float) -> None:
        self._since, self._at, self._value, self._mean = at, at, value, value

    def at(self, at: float, recent_s: float) -> float:
        """Return the mean at a time, with weights that fall to 1/e in `recent_s`."""
        weight = math.exp(-(at - self._at) / recent_s) if recent_s else 0.0
        return self._value + (self._mean - self._value) * weight

    def put(self, at: float, value: float, recent_s: float) -> None:
        """Set the value from this time on."""
        self._mean = self.at(at, recent_s) if at > self._since else value
        self._at, self._value = at, value
