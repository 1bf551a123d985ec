"""The scheduler's view of workers, turns and environment hosts, which policies may only read."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field

from rose.scheduler.events import Kind, Shape

UNBOUNDED = 1 << 62  # KV tokens, more than any turn needs
# A worker can be reserved for waiting turns that need at least this many KV tokens.
# No turn needs NOT_RESERVED tokens, so the worker is open to every turn.
NOT_RESERVED = UNBOUNDED + 1


@dataclass(slots=True, eq=False)
class TurnState:
    turn: str
    trajectory: str
    group: str
    context_tokens: int
    max_new_tokens: int
    sequence: int  # order of arrival
    requested_at: float  # seconds
    domain: str = ""  # name of the environment; in a mixture, of the member
    outcome: str = ""  # "ok" or "failed", outcome of the tool call before this turn; "" if unknown
    lane: Hashable = ""  # lane of the queue (`Routing.lane`)
    # Most KV-cache tokens that the next attempt may hold; constant while the turn waits
    kv_need: int = 0
    made_tokens: int = 0  # tokens generated in this turn, by all workers
    attempt: int = 0  # number of assignments so far
    worker: str | None = None  # None while the turn waits in the queue
    assigned_at: float = 0.0  # seconds, time of the last assignment
    progress_at: float = 0.0  # seconds, time of the last token, or of the assignment if later
    # The worker on which the turn stalled, or that returned it. Other workers are preferred.
    avoid: str | None = None
    stalls: int = 0
    moves: int = 0  # number of moves to faster workers
    held_out: bool = False  # True for turns of an evaluation
    # Evaluation turns were preempted for this turn, and it still found no worker.
    # The scheduler does not preempt for it again.
    preemption_failed: bool = False

    @property
    def whole_kv_need(self) -> int:
        """Most KV-cache tokens that the turn may hold at its end."""
        return self.context_tokens + self.max_new_tokens


@dataclass(slots=True, eq=False)
class WorkerState:
    worker: str
    kind: Kind
    max_sequences: int  # current limit; 0 if the worker accepts no turns
    kv_tokens: int  # size of the KV cache that is usable now
    version: int
    hardware: str = ""  # such as "H800"
    shape: Shape | None = None  # set if engines of other degrees share the worker's GPUs
    whole_kv_tokens: int = 0  # size of the whole cache; above `kv_tokens` while part isn't lent
    expected_s: float = 0.0  # seconds until capacity grows; 0 if none is withheld, -1 if unknown
    revoked: bool = False  # True if the online engine revoked memory and may revoke more
    # The worker returned a turn. It gets no turns until it reports its capacity again.
    awaits_capacity_report: bool = False
    loading: bool = False
    draining: bool = False
    # Provisioning doesn't use the worker: it gets neither turns nor weights.
    resting: bool = False
    turns: dict[str, int] = field(default_factory=dict)  # turn -> kv_need
    kv_assigned: int = 0  # sum of the values of `turns`
    # Trajectories and groups whose prefix or prompt is cached here (`Cluster.home`, `group_home`)
    cached: dict[str, None] = field(default_factory=dict)

    @property
    def accepts_turns(self) -> bool:
        return self.max_sequences > 0 and self.kv_tokens > 0 and not self.awaits_capacity_report

    @property
    def load(self) -> float:
        """Assigned share of the worker's sequences or KV tokens, the larger of the two; infinite
        while it accepts no turns."""
        if not self.accepts_turns:
            return float("inf")
        return max(len(self.turns) / self.max_sequences, self.kv_assigned / self.kv_tokens)

    @property
    def largest_turn(self) -> int:
        """KV tokens of the largest turn that the worker accepts while it has no other turns.

        UNBOUNDED if the whole cache is lent: a turn larger than the cache can run alone, because
        the engine preempts and recomputes. A worker that lends a part would return such a turn.
        """
        return UNBOUNDED if self.kv_tokens >= self.whole_kv_tokens else self.kv_tokens

    def room(self, queue_depth: float, without: Sequence[TurnState] = ()) -> int:
        """KV tokens of the largest turn that the worker accepts now, as if it did not have the
        turns `without`; 0 or less if it accepts none.

        `queue_depth` is a share of `max_sequences`. The worker may have this share of turns in
        addition, so that the engine has a next sequence without waiting for the coordinator.
        """
        left = len(self.turns) - len(without)
        if not left:
            return self.largest_turn
        if left >= self.max_sequences * (1 + queue_depth):
            return 0
        return self.kv_tokens - self.kv_assigned + sum(turn.kv_need for turn in without)

    def hold(self, turn: TurnState) -> None:
        self.turns[turn.turn] = turn.kv_need
        self.kv_assigned += turn.kv_need

    def free(self, turn: TurnState) -> None:
        self.kv_assigned -= self.turns.pop(turn.turn)


@dataclass(slots=True, eq=False)
class HostState:
    """The last report of an environment host (`events.HostLoad`)."""

    host: str
    running: int  # number of trajectories
    cores: float
    cpu: float  # number of runnable tasks
    memory: float  # share in use
    at: float  # seconds, time of the report


@dataclass(slots=True, eq=False)
class SavedState:
    """The newest snapshot of a trajectory (`events.TrajectorySaved`)."""

    host: str  # the host that runs the trajectory, or that it is moving to
    turns: int
    commands_s: float


# Longest pause after refusals, in seconds. With five minutes, a Slurm queue that was closed or full
# is tried again soon after it opens, however often it has refused.
LONGEST_BACK_OFF_S = 300.0


@dataclass(slots=True, eq=False)
class BackOff:
    """Exponential back-off of capacity requests after refusals.

    If several requests that were open at the same time are refused, they count as one refusal,
    because they waited in the same queue.
    """

    refusals: int = 0  # number of refusals in a row
    refused_at: float = 0.0  # seconds, time of the last refusal
    _same: set[str] = field(default_factory=set)  # requests whose refusal is counted already

    def refused(self, request: str, at: float, others: Iterable[str]) -> None:
        """Count a refusal. `others` are the requests that are still open."""
        self.refused_at = at
        if request in self._same:
            self._same.discard(request)
        else:
            self.refusals, self._same = self.refusals + 1, set(others)

    def granted(self) -> None:
        self.refusals = 0
        self._same.clear()

    def waits(self, at: float, first_s: float) -> bool:
        """True while no request may be made: for `first_s` after a refusal, for twice as long after
        the next one in a row, and so on up to `LONGEST_BACK_OFF_S`."""
        most_s = max(first_s, LONGEST_BACK_OFF_S)
        pause_s = min(first_s * 2.0 ** min(self.refusals - 1, 64), most_s)
        return bool(self.refusals) and at - self.refused_at < pause_s


@dataclass
class Cluster:
    """The state that policies see."""

    workers: dict[str, WorkerState] = field(default_factory=dict)
    turns: dict[str, TurnState] = field(default_factory=dict)
    # Trajectory -> worker that has its prefix cached
    home: dict[str, str] = field(default_factory=dict)
    # Group -> worker that has its prompt cached
    group_home: dict[str, str] = field(default_factory=dict)
    # Trajectory -> group, from the trajectory's first turn to its end
    group_of: dict[str, str] = field(default_factory=dict)
    # Training group -> number of its trajectories that have ended without failing. A group is
    # listed from its admission until it is finished or dropped.
    admitted: dict[str, int] = field(default_factory=dict)
    group_size: int = 0  # trajectories per training group; 0 if unknown
    version: int = -1  # newest published version
    step: int = 0  # newest step that has begun
    training: bool = False  # True from StartTraining to VersionPublished
    waiting: int = 0  # number of turns in the queue
    # Capacity request -> True once its job runs
    requests: dict[str, bool] = field(default_factory=dict)
    back_off: BackOff = field(default_factory=BackOff)
    # Environment hosts that have reported a load
    hosts: dict[str, HostState] = field(default_factory=dict)
    saved: dict[str, SavedState] = field(default_factory=dict)  # trajectory -> newest snapshot
