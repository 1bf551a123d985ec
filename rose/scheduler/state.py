"""What the scheduler knows of workers and turns; policies read it and change nothing."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field

from rose.scheduler.events import Kind, Shape

UNBOUNDED = 1 << 62  # KV tokens that any turn fits into
FREE = UNBOUNDED + 1  # kept for turns that need so much: for none


@dataclass(slots=True, eq=False)
class TurnState:
    turn: str
    trajectory: str
    group: str
    context_tokens: int
    max_new_tokens: int
    sequence: int  # order of arrival
    requested_at: float  # seconds
    domain: str = ""  # the environment's name, in a mixture the member's
    outcome: str = ""  # "ok" or "failed": the tool call that it follows
    lane: Hashable = ""  # of the queue, see `Routing.lane`
    kv_need: int = (
        0  # KV-cache tokens that its next attempt may come to hold; constant while it waits
    )
    made_tokens: int = 0  # of this turn, by any worker
    attempt: int = 0  # dispatches so far
    worker: str | None = None  # None: in the queue
    assigned_at: float = 0.0  # the last time
    progress_at: float = 0.0  # last progress since it was assigned
    avoid: str | None = None  # the worker that stalled on it, or gave it back: others go first
    stalls: int = 0
    moves: int = 0  # to faster workers
    held_out: bool = False  # of an evaluation
    vain: bool = False  # evaluation turns made way for it, and it still waits

    @property
    def whole_kv_need(self) -> int:
        """KV-cache tokens that the whole turn may come to hold."""
        return self.context_tokens + self.max_new_tokens


@dataclass(slots=True, eq=False)
class WorkerState:
    worker: str
    kind: Kind
    max_sequences: int  # now; 0: it takes nothing
    kv_tokens: int  # now
    version: int
    hardware: str = ""  # such as "H800"
    shape: Shape | None = None  # its GPUs are those of engines of other degrees, too
    whole_kv_tokens: int = 0  # of the whole cache; more than `kv_tokens` while a part is not lent
    expected_s: float = 0.0  # until it can take more; 0: nothing is held back; -1: unknown
    revoked: bool = False  # a part of its memory was taken back, and more may be
    gave_back: bool = False  # a turn, and has not reported since then what it can take
    loading: bool = False
    draining: bool = False
    resting: bool = False  # by provisioning: neither turns nor weights
    turns: dict[str, int] = field(default_factory=dict)  # turn -> kv_need
    kv_assigned: int = 0  # sum of `turns`
    # trajectories and groups whose home it is
    cached: dict[str, None] = field(default_factory=dict)

    @property
    def takes(self) -> bool:
        return self.max_sequences > 0 and self.kv_tokens > 0 and not self.gave_back

    @property
    def load(self) -> float:
        """Share of the tighter of its two capacities that is assigned; infinite while it takes
        nothing."""
        if not self.takes:
            return float("inf")
        return max(len(self.turns) / self.max_sequences, self.kv_assigned / self.kv_tokens)

    @property
    def holds(self) -> int:
        """The largest turn that it takes when it has no other, in KV tokens. One larger than the
        whole cache may run alone: the engine preempts and recomputes. While a part is not lent, it
        would only be given back."""
        return UNBOUNDED if self.kv_tokens >= self.whole_kv_tokens else self.kv_tokens

    def room(self, queue_depth: float) -> int:
        """The largest turn that it takes now, in KV tokens, by its caps: sequences (plus a few to
        hide the coordinator's latency) and KV need. 0 or less: none."""
        return self.room_without(queue_depth, 0, 0)

    def room_without(self, queue_depth: float, turns: int, kv_need: int) -> int:
        """The same once so many of its turns, of so much need together, are gone."""
        left = len(self.turns) - turns
        if not left:
            return self.holds
        return (
            self.kv_tokens - self.kv_assigned + kv_need
            if left < self.max_sequences * (1 + queue_depth)
            else 0
        )

    def hold(self, turn: TurnState) -> None:
        self.turns[turn.turn] = turn.kv_need
        self.kv_assigned += turn.kv_need

    def free(self, turn: TurnState) -> None:
        self.kv_assigned -= self.turns.pop(turn.turn)


@dataclass(slots=True, eq=False)
class HostState:
    """An environment host as it last told of itself."""

    host: str
    running: int  # trajectories
    cores: float
    cpu: float  # tasks that run or could run
    memory: float  # share in use
    at: float  # seconds, of the report


@dataclass(slots=True, eq=False)
class SavedState:
    """The newest snapshot of a trajectory."""

    host: str  # that runs the trajectory, or is to
    turns: int
    commands_s: float


# Seconds of the longest pause after refusals: a queue that was closed or full for a while is tried
# again within minutes, however often it has refused.
LONGEST_BACK_OFF_S = 300.0


@dataclass(slots=True, eq=False)
class BackOff:
    """When capacity may be asked for again after refusals. Requests that were open when one of them
    was refused count as one refusal together: they were asked of the same queue, and nothing has
    been asked since."""

    refusals: int = 0  # number of refusals in a row
    refused_at: float = 0.0  # time of the last refusal
    _same: set[str] = field(default_factory=set)  # requests whose refusal is counted already

    def refused(self, request: str, at: float, others: Iterable[str]) -> None:
        """`others`: requests that are still open."""
        self.refused_at = at
        if request in self._same:
            self._same.discard(request)
        else:
            self.refusals, self._same = self.refusals + 1, set(others)

    def granted(self) -> None:
        self.refusals = 0
        self._same.clear()

    def waits(self, at: float, first_s: float) -> bool:
        """True for `first_s` after a refusal, twice that after the next in a row, and so on up to
        `LONGEST_BACK_OFF_S`."""
        most_s = max(first_s, LONGEST_BACK_OFF_S)
        pause_s = min(first_s * 2.0 ** min(self.refusals - 1, 64), most_s)
        return bool(self.refusals) and at - self.refused_at < pause_s


@dataclass
class Cluster:
    """The state that policies see."""

    workers: dict[str, WorkerState] = field(default_factory=dict)
    turns: dict[str, TurnState] = field(default_factory=dict)
    # workers, joined or not, beside which a replica can train while they rest
    replicas: set[str] = field(default_factory=set)
    # trajectory -> worker with its cached prefix
    home: dict[str, str] = field(default_factory=dict)
    # group -> worker with its prompt cached
    group_home: dict[str, str] = field(default_factory=dict)
    # trajectory -> group, from its first turn to its end
    group_of: dict[str, str] = field(default_factory=dict)
    # training group from its admission until it is finished or dropped -> how many of its
    # trajectories are in
    admitted: dict[str, int] = field(default_factory=dict)
    group_size: int = 0  # trajectories of a training group; 0: unknown
    version: int = -1  # the newest published
    step: int = 0  # the newest begun
    training: bool = False  # from StartTraining to VersionPublished
    waiting: int = 0  # turns in the queue
    # capacity asked for -> whether its job runs
    requests: dict[str, bool] = field(default_factory=dict)
    back_off: BackOff = field(default_factory=BackOff)
    hosts: dict[str, HostState] = field(default_factory=dict)  # of environments, that told a load
    saved: dict[str, SavedState] = field(default_factory=dict)  # trajectory -> its newest snapshot
