"""No paper's: capacity as the queue demands, every idle GPU, the worker on which a turn ends first,
and an order."""

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

MOST_DELAY = 0.02  # of a step
CALM = 20  # steps without such a delay, after which half as early a rest is tried


class OnDemand:
    """Low-priority jobs, one worker each, as the queue of turns demands.

    From `min` to `max` of them: one more when turns have waited without a break for `patience_s`;
    one less when none has waited for `idle_s` (longer than a training phase, in which none does),
    the last asked for first. At least `cool_down_s` lie between two decisions. After a refusal
    nothing is asked for `back_off_s`, twice that after the next in a row, up to five minutes. All
    in seconds.
    """

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
        for name, value in (
            ("patience_s", patience_s),
            ("idle_s", idle_s),
            ("cool_down_s", cool_down_s),
            ("back_off_s", back_off_s),
        ):
            if not value >= 0:
                raise ValueError(f"{name}={value}: must not be negative")
        self.min, self.max, self.patience_s, self.idle_s = min, max, patience_s, idle_s
        self.cool_down_s, self.back_off_s = cool_down_s, back_off_s
        self._waiting_since: float | None = None
        self._idle_since: float | None = None
        self._decided_at = float("-inf")
        self._asked = 0

    def decide(self, at: float, cluster: Cluster) -> list[Action]:
        self._look(at, cluster.waiting > 0)
        have = len(cluster.requests)
        if have >= self.min and at - self._decided_at < self.cool_down_s:
            return []
        if self._wants_more(at, have) and not cluster.back_off.waits(at, self.back_off_s):
            self._decided_at = at
            return [RequestCapacity(self._new_name(cluster))]
        if (
            have > self.min
            and self._idle_since is not None
            and at - self._idle_since >= self.idle_s
        ):
            self._decided_at = at
            return [ReleaseCapacity(list(cluster.requests)[-1])]
        return []

    def _look(self, at: float, waiting: bool) -> None:
        if waiting:
            self._idle_since = None
            self._waiting_since = at if self._waiting_since is None else self._waiting_since
        else:
            self._waiting_since = None
            self._idle_since = at if self._idle_since is None else self._idle_since

    def _new_name(self, cluster: Cluster) -> str:
        self._asked += 1
        while (name := f"lend-{self._asked}") in cluster.requests:  # an earlier attempt's
            self._asked += 1
        return name

    def _wants_more(self, at: float, have: int) -> bool:
        waited = self._waiting_since is not None and at - self._waiting_since >= self.patience_s
        return have < self.min or have < self.max and waited


class AllIdle(RoseProvisioning):
    """ROSE's cooperative provisioning, and beside it the trainer's GPUs (hybrid workers) from each
    step's begin until its batch is complete. Ours: RLBoost (arXiv 2510.19225) lets the trainer's
    GPUs roll out beside spot machines, ROSE leaves them idle; borrowed ones and they go together,
    and with an asynchronous batching they shorten just the time for which the trainer waits. Only
    while that is long: they roll out if the trainer waited for longer than `hybrid_wait_s` (waking
    up, weights, and going to sleep again) in the last step; in the first one they do. And only
    until no more than `hybrid_tail` trajectories per dedicated worker are left, once a group of the
    step is in (0: until the batch is complete): these go on there from the tokens that they have,
    and the trainer has its GPUs again before the batch is due. After a step of which the trainer
    waited for its GPUs for more than MOST_DELAY, that is twice as many, and one at least; after
    CALM steps of which it didn't, half as many again, and no fewer than at first. The other
    arguments are those of `rose`.
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
        self._rolls = False  # hybrid workers may, now
        self._finished = 0  # groups, since the step's begin
        self._waits_since = 0.0
        self._waited_s = float("inf")

    def joins_resting(self, kind: str) -> bool:
        return kind in ("cooperative", "hybrid")

    def rolls_hybrids(self) -> bool:
        return self._rolls

    def on_event(self, event: Event, cluster: Cluster) -> list[Action]:
        actions = super().on_event(event, cluster)
        if isinstance(event, StepBegun):
            self._set_tail(event.hybrid_delay)
        match event:
            case StepBegun(at=at) if not cluster.training:
                waited, self._waits_since, self._finished = self._waited_s, at, 0
                self._rolls = waited > self.hybrid_wait_s
                return actions + (self._hybrid(cluster, UseWorker) if self._rolls else [])
            case StepBegun():
                self._waited_s = 0.0
            case WorkerJoined(kind="hybrid") if self._rolls:
                return actions + self._hybrid(cluster, UseWorker)
            case GroupFinished(at=at) if cluster.training:
                self._rolls = False
                if self._waits_since >= 0:
                    self._waited_s, self._waits_since = at - self._waits_since, -1.0
                return actions + self._hybrid(cluster, RestWorker)
            case GroupFinished():
                self._finished += 1
            case TrajectoryEnded(trajectory=ended, failed=False) if self._rolls and self._in_tail(
                ended, cluster
            ):
                self._rolls = False
                return actions + self._hybrid(cluster, RestWorker)
        return actions

    def _set_tail(self, delay: float) -> None:
        """By the delay of the step before."""
        self._calm = self._calm + 1 if delay <= MOST_DELAY else 0
        if not self._calm:
            self.hybrid_tail = max(1.0, 2 * self.hybrid_tail)
        elif self._calm % CALM == 0:
            half = self.hybrid_tail / 2
            self.hybrid_tail = max(half if half >= 1 else 0.0, self._first_tail)

    def _in_tail(self, trajectory: str, cluster: Cluster) -> bool:
        """Whether what the trajectory leaves of the admitted groups, begun or not, is few enough
        for the dedicated workers. One that fails leaves its place to another."""
        if not (self._finished and self.hybrid_tail and cluster.group_size):
            return False
        left = sum(max(0, cluster.group_size - there) for there in cluster.admitted.values())
        left -= cluster.group_of.get(trajectory) in cluster.admitted
        dedicated = sum(worker.kind == "dedicated" for worker in cluster.workers.values())
        return left <= self.hybrid_tail * dedicated

    def _hybrid(self, cluster: Cluster, change: type[UseWorker] | type[RestWorker]) -> list[Action]:
        return [
            change(name)
            for name, worker in sorted(cluster.workers.items())
            if worker.kind == "hybrid" and worker.resting == (change is UseWorker)
        ]


class DueFirst:
    """By the version that was the newest at the group's first turn, then by arrival. Ours, for
    batching policies that carry groups over (`carry_over`, `bounded_staleness`): what the next step
    waits for is not held up by what a later one may take. Nothing starves: only finitely many
    groups are older. With synchronous batching it is `fifo`."""

    def __init__(self) -> None:
        self._versions: dict[str, int] = {}  # group -> version

    def key(self, turn: TurnState, cluster: Cluster) -> int:
        return self._versions.setdefault(turn.group, cluster.version)

    def on_event(self, event: Event, cluster: Cluster) -> None:
        match event:
            case GroupFinished(group=group):
                self._versions.pop(group, None)
            case StepBegun():  # those of dropped groups
                alive = set(cluster.group_of.values())
                self._versions = {
                    group: version for group, version in self._versions.items() if group in alive
                }


class EarliestFinish:
    """Cached prefix, load, hardware and interference have one unit: the seconds until the turn ends
    (`Speeds`). Ours.

    Compared are the worker that has the prefix cached and the least loaded one of each pool of like
    workers, for the mean output of the turn's domain (at most a chunk); the smallest time wins,
    delay of the turns there included. After each `chunk_tokens` a turn is placed anew (Seer's
    divided rollout, arXiv 2511.14617; most stay). So a trajectory leaves its cached prefix when
    waiting costs more than prefill, and the last trajectories of a step, which alone decide its
    end, gather on the fastest engines. Until a pool has been measured it comes first, where the
    prefix is cached, else where least is to do. A trajectory begins only where its prefix can stay:
    while the mean context at the end of a trajectory, times those that have begun and not ended,
    fits in what all workers have now. More of them would evict each other's prefixes while their
    tools run, and be prefilled whole at every turn. `chunk_tokens` is ours: well above what prefill
    of a context costs.
    """

    def __init__(self, chunk_tokens: int) -> None:
        if chunk_tokens < 1:
            raise ValueError(f"chunk_tokens={chunk_tokens} must be at least 1")
        self.chunk_tokens = chunk_tokens
        self._speeds, self._lengths = Speeds(), Lengths()
        # trajectories of training that have begun and not ended
        self._begun: dict[str, None] = {}
        # KV tokens of all ready workers, and decisions until it is summed anew
        self._kv, self._look_in = (0, 0)

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
        if len(candidates) == 1:  # mostly, where turns wait: nothing is to be compared
            worker = candidates[0]
        else:
            worker = min(candidates, key=lambda w: self._score(turn, w, w is home))
        self._speeds.sent(turn, worker, worker is home)
        if not turn.held_out:
            self._begun[turn.trajectory] = None
        return worker

    def lane(self, turn: TurnState) -> bool:
        """Whether it may go on: a trajectory that can't begin yet holds up none that has, and none
        of an evaluation, whose turns make way."""
        return turn.held_out or turn.trajectory in self._begun

    def _fits_one_more(self, fleet: Fleet) -> bool:
        self._look_in -= 1
        if self._look_in < 0:  # once per as many decisions as there are workers: O(1) each
            self._look_in, self._kv = len(fleet), sum(w.kv_tokens for w in fleet)
        return not self._begun or (len(self._begun) + 1) * self._lengths.final <= self._kv

    def chunk(self, turn: TurnState, worker: WorkerState) -> int:
        return self.chunk_tokens

    def _score(
        self, turn: TurnState, worker: WorkerState, cached: bool
    ) -> tuple[float, float, str]:
        output = self._lengths.of_domain(turn)
        seconds = self._speeds.seconds(turn, worker, min(output, self.chunk_tokens), cached)
        if seconds is None:
            return 0.0, 0.0 if cached else 1 + worker.load, worker.worker
        return seconds, worker.load, worker.worker
