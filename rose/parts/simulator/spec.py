"""The description of a simulated cluster: frozen dataclasses with the unit of every field. The only
defaults are those that mean "none".

Times are seconds from the simulation's start, sizes are bytes or tokens, shares lie in 0..1, rates
are per second.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

Kind = Literal["dedicated", "cooperative", "spot", "serverless", "hybrid"]


# --------------------------------------------------------------------------- devices and models


@dataclass(frozen=True)
class Gpu:
    """The published peak rates of one device."""

    name: str  # such as "H800"; `WorkerJoined.hardware`
    flops: float  # FLOP/s, dense bf16
    hbm_bytes_s: float
    memory_bytes: float
    source: str


@dataclass(frozen=True)
class Model:
    """The numbers of a decoder-only model from which step times and memory are computed."""

    name: str
    parameters: float
    active_parameters: float  # per token; less than `parameters` in a mixture of experts
    layers: int
    kv_bytes_per_token: float  # all layers together


@dataclass(frozen=True)
class StepTime:
    """Coefficients of the time of an engine step, in seconds
    (rose/parts/lending/rules/predictor.py).

    T = max(c0, c1 P + c2 sum(P_i (ctx_i + P_i / 2))) + c3 D + c4 sum(ctx_decode) + c5, with P
    prefill tokens and D decoding sequences; rose/parts/simulator/hardware.py derives the
    coefficients.
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
    """Mean tokens that a decoding request drafts, and has accepted, in one engine step.

    The level of a request depends on how many siblings of its group have ended. A way to draft is a
    lower bound on the probability of a drafted token.
    """

    siblings: tuple[int, ...]  # (levels,) least number of ended siblings, ascending from 0
    drafted: np.ndarray  # (levels, ways)
    accepted: np.ndarray  # (levels, ways)
    lookup_s: float  # seconds per request, in a step that drafts
    # True: each step uses the way with the most tokens per second, or drafts nothing.
    # False: each step uses the last way.
    adaptive: bool


@dataclass(frozen=True)
class Engine:
    """A rollout engine; the fields have the names of `rollout.*` in the config."""

    step: StepTime
    max_sequences: int
    max_batched_tokens: int  # per engine step, decodes and prefill chunks together
    kv_tokens: int  # capacity of the KV cache
    prefix_caching: bool
    drafts: Drafts | None = None  # None: no drafts


# --------------------------------------------------------------------------- pools of workers


@dataclass(frozen=True)
class Link:
    """The link over which the workers of a pool get a new version from the trainer."""

    latency_s: float  # per version, independent of its size
    bytes_s: float  # bandwidth that all workers of the pool share
    version_bytes: float  # size of one version on the link: dense, or as differences
    # True: a version crosses the link once for the pool (broadcast, relay); False: once per worker
    relay: bool
    apply_s: float  # pause of the engine while it applies a version; it computes until then
    # Size of a version for a worker without the version before: it joined, or missed versions.
    full_bytes: float


@dataclass(frozen=True)
class Allocation:
    """The delays of getting a worker of this pool."""

    queue_s: float  # mean time from request to grant, exponentially distributed; 0: at once
    start_s: float  # time from the grant (a cold start) until the engine can load weights
    refused: float = 0.0  # share of the requests that the queue refuses after `queue_s`


@dataclass(frozen=True)
class Pool:
    """A pool of identical workers `{name}-{i}`, each an engine on `tensor_parallel` GPUs."""

    name: str
    kind: Kind
    gpu: Gpu
    tensor_parallel: int
    engine: Engine
    link: Link
    allocation: Allocation
    # Number of workers, all there from the start. In spot and `on_request` pools: the most at once.
    count: int
    # True: each worker is requested; a request "name" or "name-..." goes to the pool "name"
    on_request: bool = False
    serving: Serving | None = None  # cooperative pools: the online serving on the same devices
    available: Available | None = None  # spot pools: number of machines over time
    # Index of the pool's first GPU, since pools with different degrees of tensor parallelism may
    # share GPUs. None: all pools have one degree.
    first_gpu: int | None = None
    # Hybrid pools. True: the provisioning policy decides which workers sleep, so that their GPUs
    # train. False: all workers alternate between training and rollout in each step.
    split: bool = False
    # hybrid: time of each switch between training and rollout; cooperative: time to wake up
    switch_s: float = 0.0


@dataclass(frozen=True)
class Available:
    """Number of spot machines over time. Arrays (changes,); the last number holds for ever."""

    at: np.ndarray  # float64, seconds
    workers: np.ndarray  # int32, number available from `at` on


# --------------------------------------------------------------------------- co-serving


@dataclass(frozen=True)
class Load:
    """Load of the online engine on one device, piecewise constant and repeated every `period_s`."""

    at: np.ndarray  # (pieces,) float64, begin of each piece in seconds, ascending from 0
    busy: np.ndarray  # (pieces,) share of the time in which the online engine computes
    kv: np.ndarray  # (pieces,) share of the device's KV memory that its requests hold
    requests: np.ndarray  # (requests,) int64: index of the piece in which each request arrives
    ttft_s: np.ndarray  # (requests,) TTFT of each request without rollouts
    tpot_s: np.ndarray  # (requests,) TPOT without rollouts; nan for a request of one token
    period_s: float
    # Load by the same requests, in the same pieces, while rollouts compute. Under `gate` the online
    # engine decodes at the pace of its targets instead of its fastest, so that it is less `busy`.
    # Under `memory_only` its steps are slower. None: the load is the same.
    beside: Load | None = None


class Devices(Protocol):
    def load(self, device: int) -> tuple[Load, float]:
        """Return (load, offset_s) of the device with this index, from 0. At time t the device has
        the load's values of time t + offset_s. Devices may share one `Load` object."""


@dataclass(frozen=True)
class Serving:
    """Online serving on the devices of a cooperative pool, and the rules of lending beside it.

    The executor decides how the device is shared:
    1. gate (ROSE): rollout steps run in the idle time of serving.
    2. memory_only (like Prism): memory is shared and compute is contended; both sides slow down
       while both compute.
    3. none: the whole device is lent and there is no serving (an upper bound).
    """

    devices: Devices
    executor: Literal["gate", "memory_only", "none"]
    ttft_slo_s: float  # P99
    tpot_slo_s: float  # P99
    overhead: float  # gate: share of the idle time lost to admission
    # memory_only: while both sides compute, both take 1 + contention times as long
    contention: float
    reserve: float  # share of KV memory that is never lent, in addition to serving's
    # gate: while serving's and the lent KV together exceed this share of the memory, the lent KV is
    # halved. It may not grow again before the next training step.
    high_watermark: float
    # least change of lendable KV that is reported, as a share of the whole cache
    step: float
    # P99 of the seconds between two tokens of a request, alone and beside rollouts; nan: unknown
    gap_p99_s: tuple[float, float] = (math.nan, math.nan)


# --------------------------------------------------------------------------- environment


@dataclass(frozen=True)
class Episode:
    """The course of a trajectory, the same on any engine. Tuples have an element per turn."""

    prompt_tokens: int  # context of the first turn, shared by the group's members
    output_tokens: tuple[int, ...]  # generated tokens, each >= 1
    observation_tokens: tuple[int, ...]  # tokens appended to the context after the turn
    # seconds from the turn's end to the next turn's request; after the last turn, to the reward
    tool_s: tuple[float, ...]
    # True where the turn's tool call fails (`TurnRequested.outcome` of the next turn)
    failed: tuple[bool, ...]
    reward: float
    reset_s: float = 0.0  # seconds from the start to the first request
    # True: the environment dies after the last turn, and a new trajectory replaces this one.
    crashed: bool = False
    domain: str = ""


class Environment(Protocol):
    max_new_tokens: int  # limit per turn, as the scheduler knows it

    def group(
        self, index: int, size: int, version: int, draw: np.random.Generator
    ) -> list[Episode]:
        """Draw `size` episodes of prompt `index` under policy `version`, on which lengths and
        success may depend. `draw` is seeded by (run, prompt, attempt), so that systems under
        comparison get the same episodes. A later call with `size=1` replaces a crashed member."""


# --------------------------------------------------------------------------- sandboxes on hosts

Recovery = Literal["none", "replay", "full", "classified"]


@dataclass(frozen=True)
class Save:
    """The cost of saving a sandbox once."""

    # seconds of a core, while the model generates; the next command waits until the capture ended
    capture_s: float
    bytes: float  # size as sent to the store


@dataclass(frozen=True)
class Change:
    """A kind of turn: what its command changed in the sandbox."""

    share: float  # share of all turns
    save: Save | None  # None: nothing to save


@dataclass(frozen=True)
class Sandboxes:
    """The trajectories' sandboxes on the environment hosts, and how they are saved.

    When a host dies, `recovery` decides how its trajectories continue:
    1. none: they begin again.
    2. replay: another host runs their recorded commands again.
    3. full, classified: they continue from the last saved turn and generate the later turns again.
       full saves the whole sandbox after each turn, classified only what the turn changed.
    """

    cores: tuple[float, ...]  # cores of each host, shared by its commands, starts and captures
    memory_bytes: float  # memory of a host for sandboxes; a sandbox waits until there is room
    sandbox_bytes: float  # memory of one sandbox
    start_s: float  # core seconds
    turn_s: float  # core seconds that each command costs in addition to its own
    look_s: float  # core seconds to classify a turn
    changes: tuple[Change, ...]
    full: Save
    restore_s: float  # core seconds after the start
    restore_bytes: float  # bytes read from the store
    # Limit on a host's captured bytes that are not stored yet. A capture beyond it is skipped.
    staging_bytes: float
    host_bytes_s: float  # bandwidth of a host to the store, first come first served
    store_bytes_s: float  # bandwidth of the store, all hosts together
    recovery: Recovery
    mtbf_s: float  # mean time until a running host fails, exponentially distributed; inf: never
    restart_s: float  # time from a host's failure until it is up again
    detect_s: float  # time from a host's failure until its trajectories continue elsewhere
    load_s: float  # interval of a host's load reports
    failures: tuple[tuple[float, int], ...] = ()  # planned failures in addition: (at, host)


# --------------------------------------------------------------------------- training, the whole


@dataclass(frozen=True)
class Trainer:
    """The trainer. A step takes step_s + token_s x tokens + (tokens x flops_per_token + pairs x
    flops_per_pair) / (gpus x gpu.flops x mfu) seconds; without the last term if `gpus` is 0."""

    gpus: int  # 0: a trainer calibrated on a live run
    gpu: Gpu
    mfu: float  # share of the peak FLOP/s that training reaches
    # 6 x active parameters per training token, and 2 x for each further forward pass
    flops_per_token: float
    step_s: float  # time of a step that doesn't depend on its tokens: optimizer, data
    publish_s: float  # time from the step's end until the first byte of the version can leave
    token_s: float = 0.0  # seconds per token, in calibrated runs
    # FLOP of attention. A trajectory of n tokens has n x n / 2 pairs of a token and an earlier one.
    flops_per_pair: float = 0.0


@dataclass(frozen=True)
class Batch:
    """The groups that a training step needs."""

    groups: int  # per training step
    group_size: int
    dynamic_sampling: bool  # True: groups whose rewards are all equal are rejected (DAPO)


@dataclass(frozen=True)
class Spec:
    """A simulated run. `tick_s` to `stream` describe the behaviour of the live processes."""

    name: str
    steps: int
    batch: Batch
    environment: Environment
    trainer: Trainer
    pools: tuple[Pool, ...]
    tick_s: float  # interval of Tick events (rose.coordinator.records.TICK_S)
    progress_s: float  # interval of progress reports of running turns; inf: only at a turn's end
    dispatch_s: float  # delay from a scheduler's decision to the engine
    answer_s: float  # delay from an engine's last token of a turn to the scheduler
    # treatment of running turns when an engine loads new weights (transfer.in_flight)
    in_flight: Literal["recompute", "keep", "finish"] = "recompute"
    # consecutive environment crashes that end the run (live: env.max_failures_in_row)
    max_failures_in_row: int = 1000  # ours: reached only where every environment crashes
    # True: a group is trained as soon as it is certain to be in the step's batch (trainer.stream).
    stream: bool = False
    sandboxes: Sandboxes | None = None  # None: sandboxes cost nothing and no host fails
    horizon_s: float = math.inf  # limit on simulated time; a longer run is an error
