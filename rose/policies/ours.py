"""Our own policies, from no paper: capacity as the queue demands, use of every idle GPU, routing by
earliest finish, and an order by due date."""

from __future__ import annotations

from rose.policies.rose import RoseProvisioning
from rose.policies.speeds import Lengths, Speeds
from rose.scheduler.events import (
    Action,
    Event,
    GroupFinished,
    ReleaseCapacity,
    RequestCapacity,
    RestWorker,
    StepBegun,
    TrajectoryEnded,
    UseWorker,
    WorkerJoined,
)
from rose.scheduler.fleet import Fleet
from rose.scheduler.state import Cluster, TurnState, WorkerState

# Share of a step for which the trainer may wait for its GPUs before `AllIdle` rests hybrid workers
# earlier
MOST_DELAY = 0.02
CALM = 20  # steps without such a delay after which `AllIdle` halves `hybrid_tail`


class OnDemand:
    """Hold `min` to `max` low-priority jobs, one worker each, as the queue of turns demands.

    Another job is requested when turns have waited without a break for `patience_s`. The newest job
    is released when the queue has been empty for `idle_s`. `idle_s` must exceed a training phase,
    during which the queue is empty. Two decisions are at least `cool_down_s` apart. After a refusal
    nothing is requested for `back_off_s`. Each further refusal doubles this time, up to five
    minutes. Times are in seconds.
    """

    asks_for_jobs = True

    def __init__(
        self,
        min: int,
        max: int,
        patience_s: float,
        idle_s: float,
        cool_down_s: float,
        back_off_s: float,
    ) -> None:
        if not 0 <= min <= max or max < 1:
            raise ValueError(f"min={min}, max={max}: 0 <= min <= max, and max at least 1")
        names = "patience_s", "idle_s", "cool_down_s", "back_off_s"
        times = patience_s, idle_s, cool_down_s, back_off_s
        for name, value in zip(names, times, strict=True):
            if not value >= 0:
                raise ValueError(f"{name}={value}: must not be negative")
        self.min, self.max, self.patience_s, self.idle_s = min, max, patience_s, idle_s
        self.cool_down_s, self.back_off_s = cool_down_s, back_off_s
        self._waiting_since: float | None = None
        self._idle_since: float | None = None
        self._decided_at = float("-inf")
        self._asked = 0

    def decide(self, at: float, cluster: Cluster) -> list[Action]:
        self._note_queue(at, cluster.waiting > 0)
        have = len(cluster.requests)
        if have >= self.min and at - self._decided_at < self.cool_down_s:
            return []
        if self._wants_more(at, have) and not cluster.back_off.waits(at, self.back_off_s):
            self._decided_at = at
            return [RequestCapacity(self._new_name(cluster))]
        idle = self._idle_since is not None and at - self._idle_since >= self.idle_s
        if have > self.min and idle:
            self._decided_at = at
            return [ReleaseCapacity(list(cluster.requests)[-1])]
        return []

    def _note_queue(self, at: float, waiting: bool) -> None:
        """Note since when turns have been waiting, or since when the queue has been empty."""
        if waiting:
            self._idle_since = None
            self._waiting_since = at if self._waiting_since is None else self._waiting_since
        else:
            self._waiting_since = None
            self._idle_since = at if self._idle_since is None else self._idle_since

    def _new_name(self, cluster: Cluster) -> str:
        self._asked += 1
        # A request of an earlier attempt of the run may have the name.
        while (name := f"lend-{self._asked}") in cluster.requests:
            self._asked += 1
        return name

    def _wants_more(self, at: float, have: int) -> bool:
        waited = self._waiting_since is not None and at - self._waiting_since >= self.patience_s
        return have < self.min or have < self.max and waited


class AllIdle(RoseProvisioning):
    """ROSE's cooperative provisioning; in addition, the trainer's GPUs (hybrid workers) roll out
    from the beginning of each step, while the trainer would wait for its batch.

    Ours: in RLBoost (arXiv 2510.19225) the trainer's GPUs roll out beside spot machines, in ROSE
    they idle. Here they join borrowed workers. With asynchronous batching they shorten exactly the
    time for which the trainer waits.

    They roll out in the first step. In a later step they do if the trainer waited longer than
    `hybrid_wait_s` in the step before, which is the time that waking up, loading weights and going
    to sleep take. They stop
    1. when the batch is complete, or earlier:
    2. once a group of the step is finished and at most `hybrid_tail` trajectories per dedicated
       worker are left (never at 0). These trajectories continue on dedicated workers with the
       tokens generated so far, and the trainer gets its GPUs before the batch is due.

    `hybrid_tail` is doubled, to at least 1, after a step that waited for the trainer's GPUs for
    more than the share MOST_DELAY. It is halved after every CALM steps in a row without such a
    delay, down to its configured value. The other arguments are those of `rose`.
    """

    def __init__(
        self,
        n_serving: int,
        recent_s: float,
        hysteresis: float,
        activation_s: float,
        idle_s: float,
        hybrid_wait_s: float,
        hybrid_tail: float = 0.0,
    ) -> None:
        super().__init__(n_serving, recent_s, hysteresis, activation_s, idle_s)
        if not (hybrid_wait_s >= 0 and hybrid_tail >= 0):
            raise ValueError(
                f"hybrid_wait_s={hybrid_wait_s} and hybrid_tail={hybrid_tail} must not be negative"
            )
        self.hybrid_wait_s, self.hybrid_tail = hybrid_wait_s, hybrid_tail
        self._first_tail, self._calm = hybrid_tail, 0
        self._hybrids_roll = False  # True while hybrid workers may roll out
        self._finished = 0  # groups finished since the step began
        self._waits_since = 0.0  # time since which the trainer waits; -1 once its batch is complete
        self._waited_s = float("inf")  # seconds for which the trainer waited in the last step

    def joins_resting(self, kind: str) -> bool:
        return kind in ("cooperative", "hybrid")

    def rolls_hybrids(self) -> bool:
        return self._hybrids_roll

    def on_event(self, event: Event, cluster: Cluster) -> list[Action]:
        actions = super().on_event(event, cluster)
        if isinstance(event, StepBegun):
            self._set_tail(event.hybrid_delay)
        match event:
            case StepBegun(at=at) if not cluster.training:
                waited, self._waits_since, self._finished = self._waited_s, at, 0
                self._hybrids_roll = waited > self.hybrid_wait_s
                if self._hybrids_roll:
                    actions += self._change_hybrids(cluster, UseWorker)
            case StepBegun():
                self._waited_s = 0.0
            case WorkerJoined(kind="hybrid") if self._hybrids_roll:
                actions += self._change_hybrids(cluster, UseWorker)
            case GroupFinished(at=at) if cluster.training:
                self._hybrids_roll = False
                if self._waits_since >= 0:
                    self._waited_s, self._waits_since = at - self._waits_since, -1.0
                actions += self._change_hybrids(cluster, RestWorker)
            case GroupFinished():
                self._finished += 1
            case TrajectoryEnded(trajectory=ended, failed=False) if (
                self._hybrids_roll and self._in_tail(ended, cluster)
            ):
                self._hybrids_roll = False
                actions += self._change_hybrids(cluster, RestWorker)
        return actions

    def _set_tail(self, delay: float) -> None:
        """Adapt `hybrid_tail` to the last step's delay, a share of the step."""
        self._calm = self._calm + 1 if delay <= MOST_DELAY else 0
        if not self._calm:
            self.hybrid_tail = max(1.0, 2 * self.hybrid_tail)
        elif self._calm % CALM == 0:
            half = self.hybrid_tail / 2
            self.hybrid_tail = max(half if half >= 1 else 0.0, self._first_tail)

    def _in_tail(self, trajectory: str, cluster: Cluster) -> bool:
        """True if few enough trajectories for the dedicated workers are left after this one. All
        trajectories of admitted groups count, whether started or not."""
        if not (self._finished and self.hybrid_tail and cluster.group_size):
            return False
        left = sum(max(0, cluster.group_size - there) for there in cluster.admitted.values())
        left -= cluster.group_of.get(trajectory) in cluster.admitted
        dedicated = sum(worker.kind == "dedicated" for worker in cluster.workers.values())
        return left <= self.hybrid_tail * dedicated

    def _change_hybrids(
        self, cluster: Cluster, change: type[UseWorker] | type[RestWorker]
    ) -> list[Action]:
        return [
            change(name)
            for name, worker in sorted(cluster.workers.items())
            if worker.kind == "hybrid" and worker.resting == (change is UseWorker)
        ]


class DueFirst:
    """Oldest groups first, by the version that was the newest at the group's first turn; then by
    arrival.

    Ours, for batching policies that carry groups over (`carry_over`, `bounded_staleness`): turns
    that the next step waits for don't wait behind turns for a later step. Nothing starves, because
    only finitely many groups are older. With synchronous batching it equals `fifo`.
    """

    def __init__(self) -> None:
        self._versions: dict[str, int] = {}  # group -> version

    def key(self, turn: TurnState, cluster: Cluster) -> int:
        return self._versions.setdefault(turn.group, cluster.version)

    def on_event(self, event: Event, cluster: Cluster) -> None:
        match event:
            case GroupFinished(group=group):
                self._versions.pop(group, None)
            case StepBegun():  # Forget dropped groups.
                alive = set(cluster.group_of.values())
                self._versions = {
                    group: version for group, version in self._versions.items() if group in alive
                }


class EarliestFinish:
    """Send a turn to the worker on which it is predicted to end first (`Speeds`). So the effects of
    a cached prefix, load, hardware and interference are compared in one unit, seconds. Ours.

    Candidates are the worker with the prefix cached and the least loaded worker of each kind and
    hardware. The prediction is the seconds for the mean output of the turn's domain, at most a
    chunk, plus the delay of the turns already there. A pool (workers of one kind and hardware)
    without measurements comes first: its worker with the prefix cached, else its least loaded one.
    After each `chunk_tokens` a turn is placed again (Seer's divided rollout, arXiv 2511.14617);
    most turns stay. So a trajectory leaves its cached prefix when waiting costs more than prefill,
    and the last trajectories of a step, which decide its end, gather on the fastest engines.
    `chunk_tokens` is our value: a chunk takes much longer than prefill of a context.

    A new trajectory starts only while the KV of all workers holds all started trajectories, at the
    mean context that trajectories end with. Otherwise trajectories would evict each other's
    prefixes while their tools run, and every turn would prefill its whole context.
    """

    def __init__(self, chunk_tokens: int) -> None:
        if chunk_tokens < 1:
            raise ValueError(f"chunk_tokens={chunk_tokens} must be at least 1")
        self.chunk_tokens = chunk_tokens
        self._speeds, self._lengths = Speeds(), Lengths()
        self._begun: dict[str, None] = {}  # training trajectories that have started and not ended
        self._ready_kv = 0  # KV tokens of all ready workers
        self._sum_kv_in = 0  # decisions until `_ready_kv` is summed again

    def on_event(self, event: Event, cluster: Cluster) -> None:
        self._speeds.on_event(event, cluster)
        self._lengths.on_event(event, cluster)
        if isinstance(event, TrajectoryEnded):
            self._begun.pop(event.trajectory, None)

    def choose(self, turn: TurnState, fleet: Fleet, cluster: Cluster) -> WorkerState | None:
        if not self.lane(turn) and not self._fits_one_more(fleet):
            return None
        home = fleet.get(cluster.home.get(turn.trajectory, ""), turn)
        candidates = (
            fleet.least_of_each(turn) if home is None else [home, *fleet.least_of_each(turn)]
        )
        if not candidates:
            return None
        if len(candidates) == 1:  # the usual case while turns wait
            worker = candidates[0]
        else:
            worker = min(candidates, key=lambda w: self._score(turn, w, w is home))
        self._speeds.sent(turn, worker, worker is home)
        if not turn.held_out:
            self._begun[turn.trajectory] = None
        return worker

    def lane(self, turn: TurnState) -> bool:
        """True if the turn's trajectory has started or belongs to an evaluation. Such turns have a
        lane of their own, so that trajectories which may not start yet don't block them."""
        return turn.held_out or turn.trajectory in self._begun

    def _fits_one_more(self, fleet: Fleet) -> bool:
        """True if the workers' KV memory has room for one more trajectory."""
        self._sum_kv_in -= 1
        if self._sum_kv_in < 0:  # once in as many decisions as there are workers: amortized O(1)
            self._sum_kv_in, self._ready_kv = len(fleet), sum(w.kv_tokens for w in fleet)
        return not self._begun or (len(self._begun) + 1) * self._lengths.final <= self._ready_kv

    def chunk(self, turn: TurnState, worker: WorkerState) -> int:
        return self.chunk_tokens

    def _score(
        self, turn: TurnState, worker: WorkerState, cached: bool
    ) -> tuple[float, float, str]:
        """Return the sort key of a candidate, the smaller the better."""
        output = self._lengths.of_domain(turn)
        seconds = self._speeds.seconds(turn, worker, min(output, self.chunk_tokens), cached)
        if seconds is None:
            return 0.0, 0.0 if cached else 1 + worker.load, worker.worker
        return seconds, worker.load, worker.worker
