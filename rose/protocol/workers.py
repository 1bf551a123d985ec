"""Messages between the coordinator and rollout workers."""

from __future__ import annotations

from typing import Literal

from rose.protocol.common import FinishReason, Message, Sampling


class WorkerReady(Message):
    """Worker -> coordinator: the engine is up with the weights of `version`. Each restart of the
    engine raises `incarnation`."""

    worker: str  # "rollout-0"
    incarnation: int
    engine_pid: int
    max_sequences: int
    kv_tokens: int  # KV-cache capacity, tokens
    version: int  # -1: the model folder's own weights
    hardware: str = ""  # the device's name, as "H800"; "cpu"
    # serving.kind of a borrowed engine
    kind: Literal["cooperative", "spot", "serverless"] = "cooperative"
    # One line on the settings that vLLM chose for the engine, then one for each warning at start.
    description: list[str] = []


class WorkerDown(Message):
    """Worker -> coordinator: the engine died. Its turns have lost all tokens after their last
    `TurnProgress`."""

    worker: str
    incarnation: int
    error: str
    restarting: bool


class WorkerLoad(Message):
    """Worker -> coordinator, about every second: its load, and counts since the engine's start."""

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
    """Coordinator -> worker, regularly in a run with a part's method of drafting: text for drafts
    that this engine doesn't have yet."""

    content: bytes  # encoded by the part


class WorkerCapacity(Message):
    """Co-serving worker -> coordinator: its engine's current capacity, at most that of
    `WorkerReady`. Sent after a large change and after each `TurnReturned`. After a `TurnReturned`
    the worker gets no turn until this message arrives."""

    worker: str
    incarnation: int
    kv_tokens: int  # KV budget; 0: none
    max_sequences: int  # 0: it accepts no turn
    expected_s: float  # seconds until the capacity grows; 0: all is available; -1: unknown
    revoked: bool  # True: the online engine revoked memory, and may revoke the remainder


class GenerateTurn(Message):
    """Coordinator -> worker: continue these tokens. `attempt` counts how often the turn was sent to
    a worker, so that late messages of an earlier attempt are recognised and dropped."""

    turn: str
    attempt: int
    tokens: bytes  # int32: the context, and tokens of this turn that other engines generated
    sampling: Sampling
    routed: int = 0  # number of leading `tokens` whose experts are known


class AbortTurn(Message):
    """Coordinator -> worker: stop generating this turn."""

    turn: str
    attempt: int


class TurnProgress(Message):
    """Worker -> coordinator: the tokens generated since the attempt's last message."""

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
    started: float = 0.0  # when the worker received the turn; wall clock, seconds
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
    """Worker -> coordinator: the version is loaded. The worker read the live weights back, and
    every checksum equals the trainer's."""

    worker: str
    incarnation: int
    version: int
    seconds: float
    pause_s: float
    nbytes: int  # bytes read


class VersionFailed(Message):
    """Worker -> coordinator: the version could not be loaded."""

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
    """Borrowed worker -> coordinator: its last message, after every token that it generated."""

    worker: str
    incarnation: int
    reason: str
