"""What a simulated cluster is: frozen dataclasses, units in every field. No defaults but those that
mean "none".

Times are seconds from the simulation's start, sizes are bytes or tokens, shares lie in 0..1, rates
are per second. Whoever builds a `Spec` says where each number comes from (`source`); nothing in
rose/sim adds numbers of its own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np

Kind = Literal["dedicated", "cooperative", "spot", "serverless", "hybrid"]


# --------------------------------------------------------------------------- devices and models


@dataclass(frozen=True)
class Gpu:
    """Published peaks of one device."""

    name: str  # such as "H800"; `WorkerJoined.hardware`
    flops: float  # FLOP/s, dense bf16
    hbm_bytes_s: float
    memory_bytes: float
    source: str


@dataclass(frozen=True)
class Model:
    """The numbers of a decoder that time and memory follow from."""

    name: str
    parameters: float
    active_parameters: float  # per token; less than `parameters` in a mixture of experts
    layers: int
    kv_bytes_per_token: float  # of all layers


@dataclass(frozen=True)
class StepTime:
    """c0 to c5 of an engine's step, seconds: the rule of rose/lending/rules/predictor.py.

    T = max(c0, c1 P + c2 sum(P_i (ctx_i + P_i / 2))) + c3 D + c4 sum(ctx_decode) + c5; see
    rose/sim/hardware.py.
    """

    c0: float
    c1: float
    c2: float
    c3: float
    c4: float
    c5: float = 0.0

    def __post_init__(self) -> None:
        given = (self.c0, self.c1, self.c2, self.c3, self.c4, self.c5)
        if (
            not all(math.isfinite(c) and c >= 0 for c in given)
            or not self.c0 + self.c3 + self.c5 > 0
        ):
            raise ValueError(
                f"step-time coefficients {given}: six finite numbers >= 0, with c0 + c3 + c5 > 0, "
                "or a decode step would take no time"
            )


@dataclass(frozen=True)
class Drafts:
    """What a step of a decoding request drafts and has accepted on average, tokens, (levels, ways):
    by the siblings of its group that have ended, and by how unlikely a token is still drafted."""

    siblings: tuple[int, ...]  # levels: from so many on, ascending from 0
    drafted: np.ndarray
    accepted: np.ndarray
    lookup_s: float  # of each request, in a step that drafts
    adaptive: bool  # the way with the most tokens per second, or none; else the last one always


@dataclass(frozen=True)
class Engine:
    """One rollout engine; `rollout.*` of the config has the same names."""

    step: StepTime
    max_sequences: int
    max_batched_tokens: int  # of one step, decodes and prefill chunks together
    kv_tokens: int  # of the whole cache
    prefix_caching: bool
    drafts: Drafts | None = None  # None: it makes none


# --------------------------------------------------------------------------- pools of workers


@dataclass(frozen=True)
class Link:
    """How a new version gets to the workers of a pool."""

    latency_s: float  # of one version, whatever its size
    bytes_s: float  # of the whole pool's way to the trainer
    version_bytes: float  # of one version on this way: dense, or as differences
    # a version crosses once for the whole pool (broadcast, relay); else once per worker, sharing
    # bytes_s
    relay: bool
    apply_s: float  # the engine stands still for so long; before that it goes on
    full_bytes: float  # of a version for a worker that has none of them (it joins, or missed some)


@dataclass(frozen=True)
class Allocation:
    """What it costs to get a worker of this pool."""

    queue_s: float  # from the request to its grant, mean of an exponential; 0: at once
    start_s: float  # from the grant (at a cold start) until the engine can load weights
    refused: float = 0.0  # share of the requests that the queue refuses after `queue_s`


@dataclass(frozen=True)
class Pool:
    """Like workers. A worker is one engine on `tensor_parallel` GPUs; their names are
    `{name}-{i}`."""

    name: str
    kind: Kind
    gpu: Gpu
    tensor_parallel: int
    engine: Engine
    link: Link
    allocation: Allocation
    # workers: all there are from the start, or, of a pool `on_request` or of spot, the most
    count: int
    on_request: bool = (
        False  # each is asked for by RequestCapacity; a request "name" or "name-..." picks the pool
    )
    serving: Serving | None = None  # cooperative: what runs beside
    available: Available | None = None  # spot: how many there are, when
    # GPUs before its own, of pools of unlike degrees, which may share theirs; None: one degree
    first_gpu: int | None = None
    # hybrid: a worker that rests trains, the others roll out; else all change with the phases
    split: bool = False
    switch_s: float = (
        0.0  # hybrid: from training to rollout and back, each; cooperative: RestWorker -> UseWorker
    )


@dataclass(frozen=True)
class Available:
    """Spot machines over time; arrays of one length, `at` ascending from 0. The last count holds
    for ever."""

    at: np.ndarray  # float64, s
    workers: np.ndarray  # int32


# --------------------------------------------------------------------------- serving beside
# cooperative workers


@dataclass(frozen=True)
class Load:
    """What the online engine of one device does, piecewise constant and repeated each `period_s`.
    Arrays (pieces,), of its requests (requests,)."""

    at: np.ndarray  # float64, s, ascending from 0
    busy: np.ndarray  # share of the time in which it computes
    kv: np.ndarray  # share of the device's KV memory that its requests hold
    requests: np.ndarray  # (requests,) int64: the piece in which each arrives
    ttft_s: np.ndarray  # (requests,) of each without rollouts
    tpot_s: np.ndarray  # (requests,); nan for one token
    period_s: float
    beside: Load | None = (
        None  # the same pieces and requests while rollouts compute: with `gate` at the pace of the
    )
    # targets instead of its fastest, so that its `busy` is less, with `memory_only` slower; null:
    # no different


class Devices(Protocol):
    def load(self, device: int) -> tuple[Load, float]:
        """Of device 0, 1, ...: (its load, seconds by which it is ahead: time t is the load's t +
        ahead). Devices may share one `Load` object."""


@dataclass(frozen=True)
class Serving:
    """Online serving on the devices of a cooperative pool, and what is lent beside it."""

    devices: Devices
    executor: Literal["gate", "memory_only", "none"]
    # gate: ROSE's; rollout steps run in the idle time. memory_only: Prism-like; memory is shared,
    # compute is contended: both sides slow down while both compute. none: the whole device is lent
    # and serving does not exist (upper bound).
    ttft_slo_s: float  # P99
    tpot_slo_s: float  # P99
    overhead: float  # gate: share of the idle time lost to admission
    # memory_only: both take 1 + contention times as long while serving computes (1: time slices)
    contention: float
    reserve: float  # share of KV memory never lent beyond what serving holds
    # gate: share in use or lent above which what is lent is halved, until the next training step
    high_watermark: float
    # the rollout side is sent a change of lendable KV of at least this share of the whole
    step: float
    # between two tokens of a request: alone, beside; if known
    gap_p99_s: tuple[float, float] = (math.nan, math.nan)


# --------------------------------------------------------------------------- environment


@dataclass(frozen=True)
class Episode:
    """One trajectory as it will go, whoever serves it. Tuples have an element per turn."""

    prompt_tokens: int  # its first turn's context; a group's members share it
    output_tokens: tuple[int, ...]  # generated, each >= 1
    observation_tokens: tuple[int, ...]  # appended to the context after the turn
    tool_s: tuple[float, ...]  # from the turn's end to the next request; the last: to the reward
    # whether the turn's tool call fails (`TurnRequested.outcome` of the next)
    failed: tuple[bool, ...]
    reward: float
    reset_s: float = 0.0  # from its start to its first request
    crashed: bool = (
        False  # the environment dies after the last turn: another episode takes the place
    )
    domain: str = ""


class Environment(Protocol):
    max_new_tokens: int  # per turn, as the scheduler counts it

    def group(
        self, index: int, size: int, version: int, draw: np.random.Generator
    ) -> list[Episode]:
        """The members of prompt `index`, by the policy `version` (drift). `draw` is seeded by (run,
        prompt, try), so rival policies meet the same episodes. A further call with `size=1` makes a
        crashed member's replacement."""


# --------------------------------------------------------------------------- sandboxes on hosts

Recovery = Literal["none", "replay", "full", "classified"]


@dataclass(frozen=True)
class Save:
    """What it costs to save a sandbox once."""

    capture_s: float  # of a core, while the model thinks: the next command waits for its end
    bytes: float  # packed, to the store


@dataclass(frozen=True)
class Change:
    """A kind of turn, by what it has changed in its sandbox."""

    share: float  # of all turns
    save: Save | None  # None: there is nothing to save


@dataclass(frozen=True)
class Sandboxes:
    """Sandboxes of the trajectories on environment hosts, and what is saved of them.

    `recovery`, when a host dies. none: its trajectories begin again. replay: their turns are
    recorded; another host runs the recorded commands again. full, classified: they go on from the
    last turn that is saved, and make the turns after it again; full saves all after each turn,
    classified what `changes` says.
    """

    cores: tuple[float, ...]  # of each host, which its commands, starts and captures share
    memory_bytes: float  # of a host, for sandboxes; one that finds no room waits
    sandbox_bytes: float  # of memory, of one
    start_s: float  # of a core
    turn_s: float  # of a core: of each command, beside its own
    look_s: float  # of a core: to classify a turn
    changes: tuple[Change, ...]
    full: Save
    restore_s: float  # of a core, after the start
    restore_bytes: float  # read from the store
    staging_bytes: (
        float  # of a host, captured and not stored yet; a capture that finds none is left out
    )
    host_bytes_s: float  # the most that a host sends to the store, first come first served
    store_bytes_s: float  # the most that the store takes from all
    recovery: Recovery
    mtbf_s: float  # of a host that is up, mean of an exponential; inf: none fails
    restart_s: float  # until it is there again
    detect_s: float  # from its death until its trajectories go on elsewhere
    load_s: float  # between two words about a host's load
    failures: tuple[tuple[float, int], ...] = ()  # besides: (at, host)


# --------------------------------------------------------------------------- training, the whole


@dataclass(frozen=True)
class Trainer:
    """step_s + (tokens x flops_per_token + pairs x flops_per_pair) / (gpus x gpu.flops x mfu).
    `gpus` 0: step_s is all (calibrated runs)."""

    gpus: int
    gpu: Gpu
    mfu: float  # share of the peak
    flops_per_token: (
        float  # of one training token: 6 x active parameters, and 2 x for each forward pass besides
    )
    step_s: float  # whatever its tokens: optimizer, data
    publish_s: float  # from the step's end until the first byte of the version can leave
    token_s: float = 0.0  # besides, per token (calibrated runs)
    # of attention: a trajectory of n tokens has n x n / 2 pairs of a token and one before it
    flops_per_pair: float = 0.0


@dataclass(frozen=True)
class Batch:
    groups: int  # a step trains on
    group_size: int
    dynamic_sampling: bool  # a group whose rewards are all equal is refused (DAPO)


@dataclass(frozen=True)
class Spec:
    """`steps` training steps. `driver` fields say how the live coordinator behaves."""

    name: str
    steps: int
    batch: Batch
    environment: Environment
    trainer: Trainer
    pools: tuple[Pool, ...]
    tick_s: float  # between two Ticks (rose.coordinator.coordinator.TICK_S)
    progress_s: float  # between two words about a running turn; inf: one at its end
    dispatch_s: float  # from a decision to the engine
    answer_s: float  # from the engine's last token of a turn to the next decision
    in_flight: Literal["recompute", "keep", "finish"] = (
        "recompute"  # what runs when weights come (transfer.in_flight)
    )
    # environments (live: env.max_failures_in_row)
    max_failures_in_row: int = 1000  # ours: ends a run whose every environment crashes, no other
    stream: bool = False  # groups are trained as soon as a step is certain of them (trainer.stream)
    sandboxes: Sandboxes | None = None  # None: they cost nothing, and no host fails
    horizon_s: float = math.inf  # a run that takes longer is an error
    # field -> where its number is from, for reports
    source: dict[str, str] = field(default_factory=dict)
