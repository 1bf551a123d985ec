"""Every message between processes and every domain record.

Bottom of the house: imports nothing of ROSE. Bulk per-token data travels as packed little-endian
bytes (int32 tokens, float32 logprobs), so a hub that only forwards it never decodes it.
Encoding, version and size limits of a message on the wire live in `rose.comm.wire`.

Ids are strings and stable across restarts: group ``g12`` (``e3`` for held-out evaluation), a second
try of its prompt ``g12r1``, trajectory ``g12.5``, its replacement after an environment failure
``g12.5r1``, turn ``g12.5.t2``.
"""

from __future__ import annotations

import enum
from typing import Literal

import msgspec
import numpy as np
import xxhash

PROTOCOL_VERSION = 14


def seed_of(*parts: object) -> int:
    """31-bit seed from a name: stable between processes, machines and runs."""
    return xxhash.xxh3_64_intdigest("/".join(map(str, parts)).encode()) & 0x7FFFFFFF


class Role(enum.StrEnum):
    """What a rank of the job does; its number determines it (rose/launch/layout.py). Borrowed ranks
    have none: they join."""

    COORDINATOR = "coordinator"
    ENVIRONMENT = "environment"
    REWARD = "reward"
    TRAINER = "trainer"
    ROLLOUT = "rollout"


class Phase(enum.StrEnum):
    TRAIN = "train"
    EVAL = "eval"


class FinishReason(enum.StrEnum):
    STOP = "stop"  # an end-of-turn token
    LENGTH = "length"  # max_new_tokens or the model's context reached
    ABORT = "abort"  # ordered to stop; the tokens so far are valid


def pack_tokens(tokens) -> bytes:
    """Token ids (T,) -> T*4 bytes, int32 little-endian."""
    return np.asarray(tokens, dtype="<i4").tobytes()


def unpack_tokens(data: bytes) -> np.ndarray:
    """Inverse of `pack_tokens`: (T,) int32."""
    return np.frombuffer(data, dtype="<i4")


def pack_floats(values) -> bytes:
    """(T,) -> T*4 bytes, float32 little-endian."""
    return np.asarray(values, dtype="<f4").tobytes()


def unpack_floats(data: bytes) -> np.ndarray:
    return np.frombuffer(data, dtype="<f4")


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A domain record; never sent alone."""


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """A message; the class name is its tag on the wire."""


# --------------------------------------------------------------------------- domain records


class Sampling(Record):
    """How one turn is sampled. A `seed` makes it reproducible whichever engine takes it, at a
    price: vLLM then draws row by row. None: from the engine's own stream of random numbers."""

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: all
    seed: int | None = None


class Branch(Record):
    """A leaf of a trajectory whose histories form a tree; fields as `Trajectory`'s. What it shares
    with an earlier leaf is there, with mask 0."""

    tokens: bytes
    mask: bytes
    logprobs: bytes
    versions: bytes
    turn_tokens: list[tuple[int, int]] = []


class Trajectory(Record):
    """One finished episode, token-exact: no text is ever re-tokenised.

    All per-token fields have length T = number of tokens of prompt, turns and observations. An
    agent may edit its history or start sub-agents: `branches` are the leaves after the first.
    """

    id: str
    group: str
    phase: Phase
    tokens: bytes  # int32 (T,)
    mask: bytes  # uint8 (T,): 1 where the policy made the token
    # float32 (T,): the engine's log-probability when it drew the token; 0 where mask is 0
    logprobs: bytes
    versions: bytes  # int32 (T,): policy version that made the token; -1 where mask is 0
    reward: float
    success: bool
    turns: int
    response_tokens: int  # sum of mask, of all branches
    truncated: bool = False  # ended by a token or turn limit, not by the environment
    # which limit that was: "turns", "context", or "answer" for the tokens of one turn
    limit: str = ""
    invalid_calls: int = 0
    stats: dict[str, float] = {}
    started: float = 0.0  # seconds, wall clock
    finished: float = 0.0
    # the environment's name, in a mixture the member's; "" of trajectories saved by earlier
    # releases
    domain: str = ""
    branches: list[Branch] = []
    # (turn, tokens) of those that made the tokens of `mask`, in order: so each turn's span; [] of
    # trajectories saved by earlier releases
    turn_tokens: list[tuple[int, int]] = []
    # of turn 0, 1, ..., which sum to `reward`; [] where the environment gives none
    turn_rewards: list[float] = []
    # (trajectory, turns) that made its first turns, in order, before it forked off; its tokens hold
    # theirs. [] of one that began with the prompt
    inherited: list[tuple[str, int]] = []
    # with trainer.router_replay: the experts that engines chose for the first n <= T tokens, each
    # (layers, experts per token) uint8, or uint16 of models with more than 256 experts
    experts: bytes = b""
    # whether `logprobs` are of what tokens were drawn from; of trajectories saved by earlier
    # releases they are of temperature 1 and all tokens
    as_drawn: bool = False
    task: str = ""  # the environment's name of its task; "" where it has none

    @property
    def makers(self) -> list[str]:
        """Of each turn, the trajectory that made it."""
        found = [name for name, turns in self.inherited for _ in range(turns)]
        return found + [self.id] * (self.turns - len(found))

    @property
    def own_tokens(self) -> int:
        """Of `response_tokens` those of its own turns."""
        others = sum(turns for _, turns in self.inherited)
        return self.response_tokens - sum(tokens for _, tokens in self.turn_tokens[:others])

    def samples(self) -> list[Trajectory]:
        """What is trained: a row for each leaf, which has that leaf's tokens alone. Every token
        that the policy made is marked in one of them."""
        if not self.branches:
            return [self]
        first = Branch(self.tokens, self.mask, self.logprobs, self.versions, self.turn_tokens)
        return [
            msgspec.structs.replace(
                self,
                tokens=leaf.tokens,
                mask=leaf.mask,
                logprobs=leaf.logprobs,
                versions=leaf.versions,
                response_tokens=sum(leaf.mask),
                turn_tokens=leaf.turn_tokens,
                branches=[],
            )
            for leaf in (first, *self.branches)
        ]


# --------------------------------------------------------------------------- any rank


class Hello(Message):
    """First word of every rank to the coordinator."""

    rank: int
    role: Role
    index: int  # which of its role, from 0
    pid: int
    host: str


class RankFailed(Message):
    """Last word of a rank that stops on an error."""

    rank: int
    error: str


class Shutdown(Message):
    reason: str


class Goodbye(Message):
    """Everything of this rank is saved; it leaves."""

    rank: int


# --------------------------------------------------------------------------- coordinator <->
# environment host


class StartTrajectory(Message):
    """Coordinator -> environment host: own and run this trajectory to its end."""

    id: str
    group: str
    phase: Phase
    domain: str  # whose environment it is: a member of the run's mixture, or the only one
    env_seed: int  # the same for all members of a group
    sampling_seed: int | None  # of its turns; see `Sampling.seed`
    # the trajectory, on the same host, that it forks off before this turn; "": none. If that one
    # ends sooner, it begins with the prompt.
    follows: str = ""
    fork: int = 0
    # versions of the weights by which an earlier attempt of the run may have begun it
    oldest_version: int = 0
    newest_version: int = -1


class TurnRequest(Message):
    """Environment host -> coordinator: one assistant turn, please."""

    turn: str
    trajectory: str
    group: str
    phase: Phase
    tokens: bytes  # int32: the whole context so far
    sampling: Sampling
    domain: str = ""  # the environment's name, in a mixture the member's
    outcome: Literal["", "ok", "failed"] = (
        ""  # of the tool call that the turn follows; "" if it follows none
    )
    routed: int = 0  # of `tokens` the first whose experts are known


class TurnResult(Message):
    """Coordinator -> environment host: the turn is complete, wherever its parts were made."""

    turn: str
    tokens: bytes  # int32 (n,): new tokens, the end-of-turn token included
    logprobs: bytes  # float32 (n,)
    versions: bytes  # int32 (n,)
    finish: FinishReason
    migrations: int = 0
    experts: bytes = b""  # as `Trajectory`'s, of the next `routed` tokens of context and turn
    routed: int = 0


class TrajectoryFinished(Message):
    trajectory: Trajectory


class TrajectoryFailed(Message):
    """The environment raised or hung, or (`scoring`) nobody could say what the episode is worth;
    nothing of the trajectory is used."""

    id: str
    group: str
    domain: str
    error: str
    scoring: bool = False
    certain: bool = False  # every trajectory of its task would fail


class ScoreTrajectory(Message):
    """Environment host -> reward rank: what is this episode worth? `prompt` is the same for all
    answers to one prompt."""

    id: str
    prompt: str
    episode: bytes  # JSON of a rose.reward.episode.Episode


class TrajectoryScored(Message):
    """Reward rank -> environment host. `error`: why there is no score, else empty."""

    id: str
    reward: float = 0.0
    success: bool | None = None  # null: the scorer doesn't judge it
    timed_out: bool = False
    queue_s: float = 0.0  # until a worker took it
    score_s: float = 0.0  # until it had the score
    by_job: bool = False  # by a worker of a Slurm job
    error: str = ""


class CancelScore(Message):
    """Environment host -> reward rank: nobody wants it any more."""

    id: str


class RewardDemand(Message):
    """Reward rank -> coordinator: so many scores wait although its own workers are all up, the
    oldest for so long; so many ranks of Slurm jobs have joined it."""

    index: int
    waiting: int
    waited_s: float
    joined: int


class CancelTrajectory(Message):
    """Coordinator -> environment host: its tokens are no longer wanted; close it without a
    result."""

    id: str


class TrajectoryResumed(Message):
    """Environment host -> coordinator: it goes on from a snapshot with so many turns and tokens of
    the policy, which `earlier` attempts of the run have made, or this one."""

    id: str
    turns: int
    tokens: int
    earlier: bool


class HostReady(Message):
    """Environment host -> coordinator: its process is up (again). `machine`: what its environments
    say of the machine, for the run's report."""

    rank: int
    machine: str = ""


class HostBeat(Message):
    """Environment host's process -> its rank: its event loop turns."""


class HostBlocked(Message):
    """Environment host -> coordinator: `what` holds its event loop, and how long so far."""

    rank: int
    what: str


class HostLost(Message):
    """Environment host's rank -> coordinator: its process died, and another is being started. All
    that the dead one said came before this; all that the coordinator sends until `HostForgotten` is
    dropped."""

    rank: int
    error: str


class HostLoad(Message):
    """Environment host -> coordinator, now and then where the scheduler moves trajectories: the
    fields of `scheduler.events.HostLoad`."""

    rank: int
    running: int
    cores: float
    cpu: float
    memory: float


class TrajectorySaved(Message):
    """Environment host -> coordinator: a snapshot of it is where other hosts can read it; the
    fields of `scheduler.events.TrajectorySaved`."""

    rank: int
    id: str
    turns: int
    commands_s: float


class ReleaseTrajectory(Message):
    """Coordinator -> environment host: let it go, for another host to go on with, as soon as all
    of it is saved."""

    id: str


class TrajectoryReleased(Message):
    """Environment host -> coordinator, its last word about a trajectory that it was to release:
    its environment is closed, its snapshots are there."""

    rank: int
    id: str


class HostForgotten(Message):
    """Coordinator -> environment host's rank: the answer to each `HostLost`. What follows is for
    the process that was started then."""


# --------------------------------------------------------------------------- coordinator <->
# rollout worker


class WorkerReady(Message):
    """The engine is up (again) with these weights. A restart raises `incarnation`."""

    worker: str  # "rollout-0"
    incarnation: int
    engine_pid: int
    max_sequences: int
    kv_tokens: int  # KV-cache capacity, tokens
    version: int  # -1: the model folder's own weights
    hardware: str = ""  # the device's name, as "H800"; "cpu"
    kind: Literal["cooperative", "spot", "serverless"] = (
        "cooperative"  # of a borrowed one (serving.kind)
    )


class WorkerDown(Message):
    """The engine died; every turn it held is lost beyond the progress already sent."""

    worker: str
    incarnation: int
    error: str
    restarting: bool


class WorkerLoad(Message):
    """Heartbeat of a worker, each second or so."""

    worker: str
    incarnation: int
    running: int
    waiting: int
    kv_usage: float  # 0..1
    generated_tokens: int  # since start
    prompt_tokens: int
    cached_tokens: int
    steps: int = 0  # with requests, since start
    drafted: int = 0  # tokens, by speculative decoding
    accepted: int = 0  # of them
    energy_j: dict[str, float] = {}  # rose.energy.counters


class SiblingTurn(Record):
    """A part of what a turn has got on another engine."""

    turn: str
    start: int  # its first token's number within the turn
    before: bytes  # int32: the last tokens of the turn's context
    tokens: bytes  # int32


class SiblingTurns(Message):
    """Coordinator -> worker, now and then where engines draft from what groups say: new tokens of
    groups that it has turns of, and groups that have ended."""

    turns: list[SiblingTurn]
    ended: list[str]


class WorkerCapacity(Message):
    """Co-serving worker -> coordinator: what its engine can take now, of what `WorkerReady`
    declared. Sent on a material change, and after each `TurnReturned`: it gets no turn in
    between."""

    worker: str
    incarnation: int
    kv_tokens: int  # of its KV budget; 0: none
    max_sequences: int  # 0: it takes nothing
    expected_s: float  # until it can take more; 0: nothing is held back; -1: unknown
    revoked: bool  # the online engine took memory back: what is left may go, too


class GenerateTurn(Message):
    """Coordinator -> worker: continue these tokens. `attempt` counts dispatches of the turn, so
    that late words of an earlier one are recognised and dropped."""

    turn: str
    attempt: int
    tokens: bytes  # int32: context and the tokens of this turn made elsewhere
    sampling: Sampling
    routed: int = 0  # of `tokens` the first whose experts are known


class AbortTurn(Message):
    turn: str
    attempt: int


class TurnProgress(Message):
    """Worker -> coordinator: tokens since the last word on this attempt."""

    turn: str
    attempt: int
    tokens: bytes
    logprobs: bytes
    version: int
    experts: bytes = b""  # as `TurnResult`'s, where this attempt has come to an end
    routed: int = 0


class TurnFinished(Message):
    """Worker -> coordinator: last tokens of the attempt and why it ended."""

    turn: str
    attempt: int
    tokens: bytes
    logprobs: bytes
    version: int
    finish: FinishReason
    cached_tokens: int = 0
    ttft_s: float = 0.0
    started: float = 0.0  # wall clock, seconds: when the worker got it
    finished: float = 0.0
    experts: bytes = b""  # as `TurnResult`'s, where this attempt has come to an end
    routed: int = 0


class TurnReturned(Message):
    """Worker -> coordinator: the engine gave the turn back before its end, these are the last
    tokens of the attempt; it goes on elsewhere."""

    turn: str
    attempt: int
    tokens: bytes
    logprobs: bytes
    version: int
    reason: str
    experts: bytes = b""  # as `TurnResult`'s, where this attempt has come to an end
    routed: int = 0


class LoadVersion(Message):
    """Coordinator -> worker: take these weights before any further turn."""

    version: int
    store: str  # folder of the versions


class VersionLoaded(Message):
    """The live weights were read back and every checksum equals the trainer's."""

    worker: str
    incarnation: int
    version: int
    seconds: float
    pause_s: float
    nbytes: int  # read for it


class VersionFailed(Message):
    worker: str
    incarnation: int
    version: int
    error: str


# --------------------------------------------------------------------------- coordinator <->
# borrowed worker


class JoinHello(Message):
    """First message of a borrowed rank over MPI; until it was found valid no other message of
    the rank is accepted."""

    token: str  # the run's
    worker: str  # the name that the coordinator gave it


class Heartbeat(Message):
    """Coordinator -> borrowed worker: the run is alive."""


class WorkerLeaving(Message):
    """Borrowed worker -> coordinator: no further turns, please."""

    worker: str
    incarnation: int
    reason: str


class WorkerLeft(Message):
    """Borrowed worker -> coordinator: its last word; every token that it made has been sent."""

    worker: str
    incarnation: int
    reason: str


# --------------------------------------------------------------------------- coordinator <->
# trainer


class BatchSummary(Record):
    """What every trainer rank knows of the whole batch of N trajectories."""

    rewards: list[float]
    groups: list[int]  # (N,): index of the group within the batch
    response_tokens: list[int]
    truncated: list[bool]  # True only for a limit of tokens, not for the turn limit
    turn_rewards: list[list[float]] = []  # (N,): `Trajectory.turn_rewards`
    # (N,): of each turn, its segment: the turns that the same trajectories of the batch have in
    # common, numbered through the batch; [] in a batch without forks
    segments: list[list[int]] = []
    # (N,): (tokens, most) by the limit that the trajectory's answers came closest to: so many
    # tokens of the policy, of at most so many
    limits: list[tuple[int, int]] = []


class GradientSum(Record):
    """The gradient of a replica's rows of a step, in a file of rose/trainer/sums.py, and sums over
    their tokens; `ratio_max` as rose/trainer/importance.py's."""

    file: str
    statistics: dict[str, float]
    ratio_max: float


class TrainStep(Message):
    """Coordinator -> every trainer rank: the step begins. The batch's rows are the samples of its
    trajectories, one for each leaf; `owners` names each row's trajectory. The rank's own rows
    follow in `parts` messages of `TrainPart`. `micro_batches` lists them; every rank has the same
    number of micro-batches in each optimizer update (ZeRO's collectives need that). `trees`: each
    micro-batch is computed as one prefix tree."""

    step: int
    summary: BatchSummary
    micro_batches: list[list[list[int]]]  # [update][micro-batch][row]
    trees: bool
    parts: int
    # (rows,): which of the N trajectories of `summary`; empty: as many rows, in their order
    owners: list[int] = []
    # with `trainer.stream`: the batch grows by further messages of the step. `summary` and `owners`
    # are those of all groups so far, `micro_batches` of the new ones; the gradient is kept, and
    # nothing is applied.
    more: bool = False
    # with `trainer.elastic_replicas`: gradients of the step's other rows, to be added to this one's
    sums: list[GradientSum] = []


class TrainPart(Message):
    step: int
    part: int
    indices: list[int]
    trajectories: list[Trajectory]


class TrainedAhead(Message):
    """Every trainer rank -> coordinator: it holds the gradient of a `TrainStep` with `more`."""

    step: int
    index: int


class TrainDone(Message):
    """Every trainer rank -> coordinator. Metrics come from trainer 0 (already reduced)."""

    step: int
    index: int
    version: int
    metrics: dict[str, float]
    store: str
    energy_j: dict[str, float] = {}  # rose.energy.counters


class ComputeGradient(Message):
    """Coordinator -> rollout rank with an elastic replica, whose engine sleeps: the gradient of the
    rows of the `TrainStep` that follows, by the weights of `version`, goes to `file`."""

    step: int
    version: int
    store: str  # folder of the versions
    file: str


class ReplicaReady(Message):
    """Rollout rank -> coordinator: its replica's process is up (again), whose gradients' files have
    `nbytes`."""

    worker: str
    pid: int
    nbytes: int = 0


class StopReplica(Message):
    """Coordinator -> rollout rank: its replica is given up. Its process ends, and no other is
    started."""


class GradientComputed(Message):
    """Rollout rank -> coordinator: the whole gradient is in the file."""

    worker: str
    step: int
    gradient: GradientSum
    seconds: float


class ReplicaLost(Message):
    """Rollout rank -> coordinator: its replica's process died, or failed; what it was computing
    won't come."""

    worker: str
    error: str
    restarting: bool


class SaveCheckpoint(Message):
    step: int
    folder: str


class Costs(msgspec.Struct, frozen=True):
    """Of forward and backward in one layer, in any one unit. `tree`: of a pair under a prefix
    tree's mask, which counts either each pair of the micro-batch's tokens (`dense`) or those in
    which one attends to the other."""

    token: float  # without attention
    causal: float  # of a pair of tokens of one row, a causal kernel leaving out half of them
    tree: float
    dense: bool


class TrainerReady(Message):
    """Model loaded (or resumed at `step`), version published."""

    index: int
    step: int
    version: int
    store: str
    no_trees: str  # why this model's micro-batches cannot be prefix trees; "" if they can
    costs: Costs | None = None  # on this rank's device; null: nothing is known of them
    energy_j: dict[str, float] = {}  # rose.energy.counters


# --------------------------------------------------------------------------- coordinator <-> ranks
# that share a GPU


class Sleep(Message):
    """Coordinator -> trainer or rollout rank: give the device's memory back, the other role's turn
    comes. `turn` grows with every order; the answer repeats it."""

    turn: int


class Wake(Message):
    """Coordinator -> trainer or rollout rank: the device's memory is yours."""

    turn: int


class DeviceChanged(Message):
    """A rank's answer to `Sleep` or `Wake`, once it has given the memory back or taken it."""

    rank: int
    turn: int
    awake: bool
    seconds: float
    moved_gib: float  # given back, or taken
    free_gib: float  # on its device afterwards, on a CPU of the machine
    total_gib: float


AnyMessage = (
    Hello
    | RankFailed
    | Shutdown
    | Goodbye
    | StartTrajectory
    | TurnRequest
    | TurnResult
    | TrajectoryFinished
    | TrajectoryFailed
    | CancelTrajectory
    | TrajectoryResumed
    | HostReady
    | HostBeat
    | HostBlocked
    | HostLost
    | HostForgotten
    | HostLoad
    | TrajectorySaved
    | ReleaseTrajectory
    | TrajectoryReleased
    | ScoreTrajectory
    | TrajectoryScored
    | CancelScore
    | RewardDemand
    | WorkerReady
    | WorkerDown
    | WorkerLoad
    | WorkerCapacity
    | SiblingTurns
    | GenerateTurn
    | AbortTurn
    | TurnProgress
    | TurnFinished
    | TurnReturned
    | LoadVersion
    | VersionLoaded
    | VersionFailed
    | JoinHello
    | Heartbeat
    | WorkerLeaving
    | WorkerLeft
    | TrainStep
    | TrainPart
    | TrainedAhead
    | TrainDone
    | ComputeGradient
    | ReplicaReady
    | StopReplica
    | GradientComputed
    | ReplicaLost
    | SaveCheckpoint
    | TrainerReady
    | Sleep
    | Wake
    | DeviceChanged
)
