"""All messages between processes, and the records that they carry.

Imports nothing of ROSE. Per-token data travels as packed little-endian bytes (int32 tokens, float32
log-probabilities), so that a process that only forwards it never decodes it. `rose.comm.wire` has
the encoding, the version check and the size limits.

Ids are strings and stable across restarts: group ``g12`` (``e3`` for held-out evaluation), a second
attempt at its prompt ``g12r1``, trajectory ``g12.5``, its replacement after an environment failure
``g12.5r1``, turn ``g12.5.t2``.
"""

from __future__ import annotations

import enum
import functools
import operator
from typing import Literal

import msgspec
import numpy as np
import xxhash

PROTOCOL_VERSION = 16


def seed_of(*parts: object) -> int:
    """Return a 31-bit seed from a name: the same in all processes, machines and runs."""
    return xxhash.xxh3_64_intdigest("/".join(map(str, parts)).encode()) & 0x7FFFFFFF


class Role(enum.StrEnum):
    """The role of a rank of the job, which its number determines (rose/launch/layout.py). Borrowed
    ranks, which join at run time, have no role."""

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
    ABORT = "abort"  # aborted by the coordinator; the tokens so far are valid


def pack_tokens(tokens) -> bytes:
    """Pack token ids (T,) into T*4 bytes, int32 little-endian."""
    return np.asarray(tokens, dtype="<i4").tobytes()


def unpack_tokens(data: bytes) -> np.ndarray:
    """Invert `pack_tokens`: (T,) int32."""
    return np.frombuffer(data, dtype="<i4")


def pack_floats(values) -> bytes:
    """Pack (T,) values into T*4 bytes, float32 little-endian."""
    return np.asarray(values, dtype="<f4").tobytes()


def unpack_floats(data: bytes) -> np.ndarray:
    return np.frombuffer(data, dtype="<f4")


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A domain record; never sent alone."""


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """A message; the class name is its tag on the wire."""


# --------------------------------------------------------------------------- domain records


class Sampling(Record):
    """The sampling parameters of a turn. With a `seed` every engine generates the same tokens, but
    vLLM samples the batch row by row, which is slower. None: the engine's own random numbers."""

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: all tokens
    seed: int | None = None


class Branch(Record):
    """A leaf of a trajectory whose histories form a tree. Its fields are those of `Trajectory`.
    Tokens that it shares with an earlier leaf have mask 0."""

    tokens: bytes
    mask: bytes
    logprobs: bytes
    versions: bytes
    turn_tokens: list[tuple[int, int]] = []


class Trajectory(Record):
    """A finished episode, exact in its tokens: no text is ever tokenised again. All per-token
    fields have length T = number of tokens of prompt, turns and observations. An agent may edit its
    history or start sub-agents: `branches` are the leaves after the first."""

    id: str
    group: str
    phase: Phase
    tokens: bytes  # int32 (T,)
    mask: bytes  # uint8 (T,): 1 where the policy generated the token
    # float32 (T,): the engine's log-probability when it sampled the token; 0 where mask is 0
    logprobs: bytes
    versions: bytes  # int32 (T,): policy version that generated the token; -1 where mask is 0
    reward: float
    success: bool
    turns: int
    response_tokens: int  # sum of mask over all branches
    truncated: bool = False  # True: ended by a token or turn limit, not by the environment
    # the limit that ended it: "turns", "context", or "answer" for the tokens of one turn
    limit: str = ""
    invalid_calls: int = 0
    stats: dict[str, float] = {}
    started: float = 0.0  # seconds, wall clock
    finished: float = 0.0
    # the environment's name, or the member's in a mixture
    domain: str = ""
    branches: list[Branch] = []
    # (turn, number of its tokens), in the order of the tokens with mask 1
    turn_tokens: list[tuple[int, int]] = []
    # rewards of turn 0, 1, ..., whose sum is `reward`; [] where the environment gives none
    turn_rewards: list[float] = []
    # For a trajectory that forked off another: (trajectory, number of turns) of the turns before
    # the fork, in order. `tokens` includes theirs.
    inherited: list[tuple[str, int]] = []
    # with trainer.router_replay: the experts that engines chose for the first n <= T tokens, each
    # (layers, experts per token) uint8, or uint16 for models with more than 256 experts
    experts: bytes = b""
    task: str = ""  # the environment's name for its task; "" where it has none

    @property
    def makers(self) -> list[str]:
        """The trajectory that played each turn, (turns,)."""
        found = [name for name, turns in self.inherited for _ in range(turns)]
        return found + [self.id] * (self.turns - len(found))

    @property
    def own_tokens(self) -> int:
        """Number of `response_tokens` without those of inherited turns."""
        others = sum(turns for _, turns in self.inherited)
        return self.response_tokens - sum(tokens for _, tokens in self.turn_tokens[:others])

    def samples(self) -> list[Trajectory]:
        """Return the training samples: one for each leaf, with that leaf's tokens. Each token that
        the policy generated has mask 1 in exactly one of them."""
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
    """Any rank -> coordinator: its first message."""

    rank: int
    role: Role
    index: int  # number among the ranks of its role, from 0
    pid: int
    host: str


class RankFailed(Message):
    """Any rank -> coordinator: the last message of a rank that stops on an error."""

    rank: int
    error: str


class Shutdown(Message):
    reason: str


class Goodbye(Message):
    """Any rank -> coordinator: it has saved everything and exits."""

    rank: int


# --------------------------------------------------------------------------- coordinator <->
# environment host


class StartTrajectory(Message):
    """Coordinator -> environment host: run this trajectory to its end."""

    id: str
    group: str
    phase: Phase
    domain: str  # the environment's name, or the member's in a mixture
    env_seed: int  # the same for all members of a group
    sampling_seed: int | None  # seed of its turns; see `Sampling.seed`
    # It forks off the trajectory `follows`, on the same host, before turn `fork`; "": no fork. If
    # `follows` ends before that turn, it begins with the prompt.
    follows: str = ""
    fork: int = 0
    # It resumes turns of an earlier attempt of the run if their policy versions are in this range.
    oldest_version: int = 0
    newest_version: int = -1


class TurnRequest(Message):
    """Environment host -> coordinator: generate one turn."""

    turn: str
    trajectory: str
    group: str
    phase: Phase
    tokens: bytes  # int32: the whole context so far
    sampling: Sampling
    domain: str = ""  # the environment's name, or the member's in a mixture
    # outcome of the tool call before the turn; "" if there was none
    outcome: Literal["", "ok", "failed"] = ""
    routed: int = 0  # number of leading `tokens` whose experts the host has


class TurnResult(Message):
    """Coordinator -> environment host: the whole turn, whichever engines generated its parts."""

    turn: str
    tokens: bytes  # int32 (n,): new tokens, the end-of-turn token included
    logprobs: bytes  # float32 (n,)
    versions: bytes  # int32 (n,)
    finish: FinishReason
    migrations: int = 0
    # Experts (as in `Trajectory`) of `routed` tokens of context and turn: those that follow the
    # `routed` tokens of the request.
    experts: bytes = b""
    routed: int = 0


class TrajectoryFinished(Message):
    trajectory: Trajectory


class TrajectoryFailed(Message):
    """Environment host -> coordinator: the environment raised or hung, or (`scoring`) the episode
    got no score. Nothing of the trajectory is used."""

    id: str
    group: str
    domain: str
    error: str
    scoring: bool = False
    certain: bool = False  # True: every trajectory of its task would fail


class ScoreTrajectory(Message):
    """Environment host -> reward rank: score this episode. `prompt` is the same for all answers to
    one prompt."""

    id: str
    prompt: str
    episode: bytes  # JSON of a rose.reward.episode.Episode


class TrajectoryScored(Message):
    """Reward rank -> environment host: the score, or the `error` for which there is none."""

    id: str
    reward: float = 0.0
    success: bool | None = None  # None: the scorer reports no success
    timed_out: bool = False
    queue_s: float = 0.0  # seconds until a worker took it
    score_s: float = 0.0  # seconds from then to the score
    by_job: bool = False  # True: scored by a worker of a Slurm job
    error: str = ""


class CancelScore(Message):
    """Environment host -> reward rank: drop the episode, its score is no longer needed."""

    id: str


class RewardDemand(Message):
    """Reward rank -> coordinator: its backlog although all its own workers are up."""

    index: int
    waiting: int  # scores that wait
    waited_s: float  # wait of the oldest, seconds
    joined: int  # ranks of Slurm jobs that have joined it


class CancelTrajectory(Message):
    """Coordinator -> environment host: end the trajectory without a result."""

    id: str


class TrajectoryResumed(Message):
    """Environment host -> coordinator: the trajectory resumes from a snapshot."""

    id: str
    turns: int
    tokens: int  # tokens in the snapshot that the policy generated
    earlier: bool  # True: an earlier attempt of the run took the snapshot; False: this one


class HostReady(Message):
    """Environment host -> coordinator: its process is up, at the start or after a restart."""

    rank: int
    machine: str = ""  # text of its environments about the machine, for the run's report


class HostBeat(Message):
    """Environment host's process -> its rank: its event loop is responsive."""


class HostBlocked(Message):
    """Environment host -> coordinator: `what` names the code that blocks its event loop, and for
    how long so far."""

    rank: int
    what: str


class HostLost(Message):
    """Environment host's rank -> coordinator: its process died, and another one is starting. The
    messages of the dead process were sent before this one. The rank drops what the coordinator
    sends until `HostForgotten`."""

    rank: int
    error: str


class HostLoad(Message):
    """Environment host -> coordinator, regularly where the scheduler moves trajectories: the
    fields of `scheduler.events.HostLoad`."""

    rank: int
    running: int
    cores: float
    cpu: float
    memory: float


class TrajectorySaved(Message):
    """Environment host -> coordinator: a snapshot is stored where other hosts can read it; the
    fields of `scheduler.events.TrajectorySaved`."""

    rank: int
    id: str
    turns: int
    commands_s: float


class ReleaseTrajectory(Message):
    """Coordinator -> environment host: release the trajectory as soon as it is saved, so that
    another host can resume it."""

    id: str


class TrajectoryReleased(Message):
    """Environment host -> coordinator, its last message about a trajectory to be released: the
    environment is closed, and the snapshots are stored."""

    rank: int
    id: str


class HostForgotten(Message):
    """Coordinator -> environment host's rank: the answer to each `HostLost`. Later messages are for
    the new process."""


# --------------------------------------------------------------------------- coordinator <->
# rollout worker


class WorkerReady(Message):
    """Worker -> coordinator: the engine is up with these weights. Each restart of the engine raises
    `incarnation`."""

    worker: str  # "rollout-0"
    incarnation: int
    engine_pid: int
    max_sequences: int
    kv_tokens: int  # KV-cache capacity, tokens
    version: int  # -1: the model folder's own weights
    hardware: str = ""  # the device's name, as "H800"; "cpu"
    # serving.kind of a borrowed engine
    kind: Literal["cooperative", "spot", "serverless"] = "cooperative"
    # A line about what vLLM chose for the engine, and one for each warning of its start.
    description: list[str] = []


class WorkerDown(Message):
    """Worker -> coordinator: the engine died. Its turns have lost all tokens after their last
    `TurnProgress`."""

    worker: str
    incarnation: int
    error: str
    restarting: bool


class WorkerLoad(Message):
    """Worker -> coordinator: its load, about every second. Counters are those since its start."""

    worker: str
    incarnation: int
    running: int
    waiting: int
    kv_usage: float  # 0..1
    generated_tokens: int
    prompt_tokens: int
    cached_tokens: int
    steps: int = 0  # engine steps with requests
    drafted: int = 0  # tokens drafted by speculative decoding
    accepted: int = 0  # drafted tokens that were accepted
    energy_j: dict[str, float] = {}  # rose.energy.counters


class DraftText(Message):
    """Coordinator -> worker, regularly where engines draft by a part's method: text that the engine
    hasn't."""

    content: bytes  # encoded by the part


class WorkerCapacity(Message):
    """Co-serving worker -> coordinator: its engine's current capacity, at most what `WorkerReady`
    declared. Sent on a material change, and after each `TurnReturned`: until then the worker gets
    no turn."""

    worker: str
    incarnation: int
    kv_tokens: int  # KV budget; 0: none
    max_sequences: int  # 0: it accepts no turn
    expected_s: float  # seconds until the capacity grows; 0: it is complete; -1: unknown
    revoked: bool  # True: the online engine revoked memory, and may revoke the remainder


class GenerateTurn(Message):
    """Coordinator -> worker: continue these tokens. `attempt` counts dispatches of the turn, so
    that late messages of an earlier one are recognised and dropped."""

    turn: str
    attempt: int
    tokens: bytes  # int32: the context, and tokens of this turn that other engines generated
    sampling: Sampling
    routed: int = 0  # number of leading `tokens` whose experts are known


class AbortTurn(Message):
    turn: str
    attempt: int


class TurnProgress(Message):
    """Worker -> coordinator: the tokens since the last message of this attempt."""

    turn: str
    attempt: int
    tokens: bytes
    logprobs: bytes
    version: int
    experts: bytes = b""  # `TurnResult.experts`; empty until the attempt ends
    routed: int = 0


class TurnFinished(Message):
    """Worker -> coordinator: the last tokens of the attempt, and the reason for its end."""

    turn: str
    attempt: int
    tokens: bytes
    logprobs: bytes
    version: int
    finish: FinishReason
    cached_tokens: int = 0
    ttft_s: float = 0.0
    started: float = 0.0  # wall clock, seconds: when the worker received it
    finished: float = 0.0
    experts: bytes = b""  # `TurnResult.experts`
    routed: int = 0


class TurnReturned(Message):
    """Worker -> coordinator: the engine returned the turn before its end. These are the attempt's
    last tokens; another worker continues the turn."""

    turn: str
    attempt: int
    tokens: bytes
    logprobs: bytes
    version: int
    reason: str
    experts: bytes = b""  # `TurnResult.experts`
    routed: int = 0


class LoadVersion(Message):
    """Coordinator -> worker: load these weights before any further turn."""

    version: int
    store: str  # folder of the versions


class VersionLoaded(Message):
    """Worker -> coordinator: the version is loaded. The live weights were read back, and every
    checksum equals the trainer's."""

    worker: str
    incarnation: int
    version: int
    seconds: float
    pause_s: float
    nbytes: int  # bytes read


class VersionFailed(Message):
    worker: str
    incarnation: int
    version: int
    error: str


# --------------------------------------------------------------------------- coordinator <->
# borrowed worker


class JoinHello(Message):
    """Borrowed worker -> coordinator: its first message over MPI. The coordinator accepts no other
    message of the rank until this one is valid."""

    token: str  # the run's token
    worker: str  # the name that the coordinator assigned


class Heartbeat(Message):
    """Coordinator -> borrowed worker: the run is alive."""


class WorkerLeaving(Message):
    """Borrowed worker -> coordinator: send no further turns."""

    worker: str
    incarnation: int
    reason: str


class WorkerLeft(Message):
    """Borrowed worker -> coordinator: its last message; it has sent every token it generated."""

    worker: str
    incarnation: int
    reason: str


# --------------------------------------------------------------------------- coordinator <->
# trainer


class BatchSummary(Record):
    """Facts about all N trajectories of the batch, which every trainer rank receives."""

    rewards: list[float]
    groups: list[int]  # (N,): index of the group within the batch
    response_tokens: list[int]
    truncated: list[bool]  # True only for a limit of tokens, not for the turn limit
    turn_rewards: list[list[float]] = []  # (N,): `Trajectory.turn_rewards`
    # (N,): segment of each turn. A segment has the turns that the same trajectories share; it has
    # one number throughout the batch. [] in a batch without forks.
    segments: list[list[int]] = []
    # (N,): (generated tokens, allowed tokens) of the limit that the trajectory came closest to
    limits: list[tuple[int, int]] = []


class TrainStep(Message):
    """Coordinator -> every trainer rank: the step begins. The batch's rows are the samples of its
    trajectories, one for each leaf. The rank's own rows follow in `parts` messages of `TrainPart`.
    Every rank has the same number of micro-batches in each optimizer update, which ZeRO's
    collectives need."""

    step: int
    summary: BatchSummary
    micro_batches: list[list[list[int]]]  # [update][micro-batch][row], the rank's own rows
    trees: bool  # True: each micro-batch is computed as one prefix tree
    parts: int
    # (rows,): each row's index among the N trajectories of `summary`; []: row i has trajectory i
    owners: list[int] = []
    # True, with `trainer.stream`: further messages add to the batch. `summary` and `owners` cover
    # all groups so far, `micro_batches` the new ones. The gradient is accumulated and not applied.
    more: bool = False


class TrainPart(Message):
    step: int
    part: int
    indices: list[int]
    trajectories: list[Trajectory]


class TrainedAhead(Message):
    """Every trainer rank -> coordinator: it computed the gradient of a `TrainStep` with `more`."""

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


class SaveCheckpoint(Message):
    step: int
    folder: str


class Costs(msgspec.Struct, frozen=True):
    """Costs of forward and backward in one layer, all in the same arbitrary unit."""

    token: float  # cost of a token without attention
    # Cost of a pair of tokens of one row. A causal kernel computes half of the pairs.
    causal: float
    # Cost of a pair under a prefix tree's mask. `dense`: all pairs of the micro-batch's tokens
    # count; else those in which one token attends to the other.
    tree: float
    dense: bool


class TrainerReady(Message):
    """Trainer rank -> coordinator: the model is loaded, or resumed at `step`, and the version is
    published."""

    index: int
    step: int
    version: int
    store: str
    no_trees: str  # reason for which this model can't compute prefix trees; "" if it can
    costs: Costs | None = None  # costs on this rank's device; None: unknown
    energy_j: dict[str, float] = {}  # rose.energy.counters


# --------------------------------------------------------------------------- coordinator <-> ranks
# that share a GPU


class Sleep(Message):
    """Coordinator -> trainer or rollout rank: free the device's memory for the other role. `turn`
    numbers these orders; the answer repeats it."""

    turn: int


class Wake(Message):
    """Coordinator -> trainer or rollout rank: the device's memory is free, allocate yours."""

    turn: int


class DeviceChanged(Message):
    """A rank's answer to `Sleep` or `Wake`, after it has freed or allocated the memory."""

    rank: int
    turn: int
    awake: bool
    seconds: float
    moved_gib: float  # memory freed or allocated
    free_gib: float  # memory then free on its device, or of the machine on a CPU
    total_gib: float


AnyMessage = functools.reduce(operator.or_, Message.__subclasses__())  # the decoder's type
