"""Per-token data, the records of trajectories, and the messages of more than one kind of rank."""

from __future__ import annotations

import enum

import msgspec
import numpy as np
import xxhash

PROTOCOL_VERSION = 16


def seed_of(*parts: object) -> int:
    """Return a 31-bit seed for a name. It is the same in all processes, machines and runs."""
    return xxhash.xxh3_64_intdigest("/".join(map(str, parts)).encode()) & 0x7FFFFFFF


class Role(enum.StrEnum):
    """The role of a rank of the run's job. Its MPI rank determines it (rose/launch/layout.py).
    Borrowed ranks, which join at run time, have no role."""

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
    ABORT = "abort"  # the coordinator's AbortTurn; the tokens so far are valid


def pack_tokens(tokens) -> bytes:
    """Pack token ids (T,) into T*4 bytes, int32 little-endian."""
    return np.asarray(tokens, dtype="<i4").tobytes()


def unpack_tokens(data: bytes) -> np.ndarray:
    """Return the (T,) int32 tokens that `pack_tokens` packed."""
    return np.frombuffer(data, dtype="<i4")


def pack_floats(values) -> bytes:
    """Pack (T,) values into T*4 bytes, float32 little-endian."""
    return np.asarray(values, dtype="<f4").tobytes()


def unpack_floats(data: bytes) -> np.ndarray:
    """Return the (T,) float32 values that `pack_floats` packed."""
    return np.frombuffer(data, dtype="<f4")


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A part of a message; never sent alone."""


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """A message; the class name is its tag on the wire."""


# --------------------------------------------------------------------------- domain records


class Sampling(Record):
    """The sampling parameters of a turn. With a `seed` every engine generates the same tokens, but
    vLLM then samples a batch row by row, which is slower. Without one (None) each engine draws its
    own random numbers."""

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: all tokens
    seed: int | None = None


class Branch(Record):
    """A leaf of a trajectory whose histories form a tree: all tokens from the root to this leaf.
    The fields are as in `Trajectory`. Tokens that an earlier leaf also has have mask 0."""

    tokens: bytes
    mask: bytes
    logprobs: bytes
    versions: bytes
    turn_tokens: list[tuple[int, int]] = []


class Trajectory(Record):
    """A finished episode, with exactly the tokens that the engines read and generated: no text is
    ever tokenised again. Per-token fields have length T, the number of tokens of prompt, turns and
    observations. An agent may edit its history or start sub-agents, so that histories form a tree.
    The per-token fields then describe the first leaf, and `branches` the others."""

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
    # the limit that ended it: "turns", "context" or "answer" (tokens of one turn); "" for none
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
    # Turns before the fork, if it forked off another trajectory: (trajectory that played them,
    # number of turns), in order. `tokens` includes the tokens of these turns.
    inherited: list[tuple[str, int]] = []
    # With trainer.router_replay: the experts that engines chose for the first n <= T tokens. Each
    # token has (layers, experts per token) uint8, or uint16 if the model has over 256 experts.
    experts: bytes = b""
    task: str = ""  # the environment's name for its task; "" where it has none

    @property
    def makers(self) -> list[str]:
        """Ids of the trajectories that played turn 0, 1, ...; inherited turns have another's id."""
        found = [name for name, turns in self.inherited for _ in range(turns)]
        return found + [self.id] * (self.turns - len(found))

    @property
    def own_tokens(self) -> int:
        """Number of tokens in `response_tokens` that are not from inherited turns."""
        others = sum(turns for _, turns in self.inherited)
        return self.response_tokens - sum(tokens for _, tokens in self.turn_tokens[:others])

    def samples(self) -> list[Trajectory]:
        """Return one training sample for each leaf, with the leaf's tokens. Each token that the
        policy generated has mask 1 in exactly one sample."""
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
    """Any rank -> coordinator: the rank's first message."""

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
    """Coordinator -> any rank: save everything and exit."""

    reason: str


class Goodbye(Message):
    """Any rank -> coordinator: the rank has saved everything and exits."""

    rank: int


# --------------------------------------------------------------------------- coordinator <-> ranks
# that share a GPU


class Sleep(Message):
    """Coordinator -> trainer or rollout rank: free the device's memory for the other role. `turn`
    counts `Sleep` and `Wake` messages; the answer repeats it."""

    turn: int


class Wake(Message):
    """Coordinator -> trainer or rollout rank: the device's memory is free, allocate yours again."""

    turn: int


class DeviceChanged(Message):
    """Trainer or rollout rank -> coordinator: memory is freed (`Sleep`) or allocated (`Wake`)."""

    rank: int
    turn: int
    awake: bool
    seconds: float
    moved_gib: float  # memory freed or allocated
    free_gib: float  # afterwards free on its device; on a CPU: in the machine's memory
    total_gib: float
