"""The types of `sim`: the cluster that mode=simulate and mode=plan simulate, and the systems
compared on it.

Left out: what the rest of the tree says of a simulated run as of a live one (model, batch, engines,
scheduler).
"""

from __future__ import annotations

from typing import Any, Literal

from rose.config.common import (
    Count,
    Fraction,
    Natural,
    NotNegative,
    Positive,
    Scheduler,
    Section,
    Share,
)


class SimLink(Section):
    """How a new policy version gets from the trainer to the workers of a pool."""

    latency_s: NotNegative  # of one version, whatever its size
    gbit_s: Positive  # of the pool's whole way to the trainer
    delta: bool  # as differences of ROSE's codec; else dense
    relay: bool  # a version crosses once for the whole pool; else once per worker


class SimAllocation(Section):
    """What it costs to get a worker of a pool."""

    queue_s: NotNegative  # from the request to its grant, mean
    start_s: NotNegative  # from the grant until the engine can load weights
    refused: Fraction  # of the requests


class SimPool(Section):
    kind: Literal["dedicated", "cooperative", "spot", "serverless", "hybrid"]
    gpu: str  # one of rose.sim.hardware's
    # engines: all from the start, or the most, of spot and of a pool on request; null
    workers: Natural | None
    # (hybrid): as many as the trainer's GPUs make
    # one degree for all; or of dedicated engines, one of each of these degrees, `workers` times
    tensor_parallel: Count | list[Count]
    # hybrid: each trains or rolls out as provisioning says; else all roll out when the trainer has
    # nothing
    split: bool
    on_request: bool  # each is asked for by the provisioning policy
    # hybrid: from training to rollout and back, each; cooperative: to wake up, weights besides
    switch_s: NotNegative
    link: SimLink
    allocation: SimAllocation
    # dedicated: the degrees of the list are shapes of the same GPUs, which `workers` engines of the
    # first fill; provisioning decides which are awake
    elastic: bool = False
    # of each engine; null: rollout.max_sequences, of a list's degrees as many for each GPU
    max_sequences: Count | None = None


class SimSlo(Section):
    """P99 targets of the online model."""

    ttft_p99_s: Positive
    tpot_p99_s: Positive


class SimServing(Section):
    """Online traffic of each cooperative device, and what lending beside the online engine costs
    either side (docs/benchmarks.md measures that). `trace`: a file in the format of Azure, Mooncake
    or BurstGPT; null: made by rose.sim.traces.generate with `args`."""

    model: str  # one of rose.sim.hardware's shapes
    slo: SimSlo
    max_sequences: Count
    max_batched_tokens: Count
    # requests/s of one device, mean; null: `load` of the most at which one alone keeps its
    rate: Positive | None
    load: Share  # targets
    trace: str | None
    # of rose.sim.traces.generate, or for a file of Trace.clipped: {max_prompt: ..., max_output:
    # ...}
    args: dict[str, Any]
    hold_s: NotNegative  # gate: the longest rollout step that a request may have to wait for
    # gate: of the P99 TPOT target, to which online decodes may be slowed while rollouts have work
    pace: Share
    overhead: Fraction  # gate: share of the idle time lost to admission
    contention: NotNegative  # memory_only: both take 1 + this times as long while serving computes
    reserve: Fraction  # share of KV memory never lent
    high_watermark: Share  # gate: share of it in use or lent above which what is lent is halved
    step: Share  # the scheduler is sent a change of lendable memory of at least this share


class SimSpot(Section):
    """When spot machines are there. `trace`: a file in one of Bamboo's formats; null: made with
    `args`."""

    trace: str | None
    args: dict[str, Any]


class SimEnvironment(Section):
    """How episodes go: of one or more of rose.sim.domains, each prompt of one of them by
    `weights`."""

    domains: list[str]
    weights: list[Positive] | None  # null: alike
    # of a parameter of all of them: {output: 2.0} is twice the tokens per turn
    factors: dict[str, Positive]


class SimSave(Section):
    """What it costs to save a sandbox once."""

    capture_s: NotNegative  # of a core, while the model thinks
    bytes: NotNegative  # packed, to the store


class SimChange(Section):
    """Turns of a kind, by what they have changed."""

    share: Fraction  # of all turns
    save: SimSave | None  # null: there is nothing to save


class SimSandboxes(Section):
    """Sandboxes on environment hosts and what is saved of them (`rose.sim.spec.Sandboxes`).
    `scripts/bench_sandbox.py` measures what one costs."""

    hosts: Natural  # environment hosts; 0: sandboxes cost nothing and no host fails
    cores: list[Positive]  # of the hosts in turn
    memory_gib: Positive  # of a host
    sandbox_mib: Positive  # of one sandbox
    start_s: NotNegative  # of a core, all four
    turn_s: NotNegative  # of each command, beside its own
    look_s: NotNegative  # to classify a turn
    restore_s: NotNegative  # after the start
    restore_bytes: NotNegative
    changes: dict[str, SimChange]  # kinds of turns
    full: SimSave  # of all of it, after each turn
    staging_mib: Positive  # of a host: captured, not stored yet
    host_mb_s: Positive  # to the store, each
    store_mb_s: Positive  # all hosts together
    recovery: Literal["none", "replay", "full", "classified"]
    mtbf_h: Positive | None  # mean time between failures of a host; null: none fails
    restart_s: NotNegative
    detect_s: NotNegative
    load_s: Positive  # between two words about a host's load


class SimDrafted(Section):
    """Of drafts of at most so many tokens, what a step of a decoding request drafts and has
    accepted, tokens: by siblings that have ended, then by chance."""

    tokens: Count
    drafted: list[list[NotNegative]]
    accepted: list[list[NotNegative]]


class SimDraft(Section):
    """Acceptance of drafts by engines of systems with `draft` group. `scripts/replay_drafts.py`
    counts it in a recorded run."""

    lookup_s: NotNegative  # of a request, in a step that drafts
    siblings: list[Natural]  # that have ended, from so many on; []: no simulated engine drafts
    chances: list[Share]  # down to which tokens are drafted
    lengths: list[SimDrafted]


class SimTrainer(Section):
    gpu: str
    mfu: Share
    # beside the update's own: old log-probabilities, reference; null: as our trainer makes
    forward_passes: NotNegative | None


class SimSystem(Section):
    """A composition of scheduler options and what they may use."""

    about: str  # a line: what it is, after which paper
    scheduler: Scheduler
    pools: list[str]
    executor: Literal["gate", "memory_only", "none"]  # beside online serving
    dynamic_sampling: bool
    in_flight: Literal["recompute", "keep", "finish"]
    stream: bool = False  # as trainer.stream
    draft: Literal["none", "group"] = "none"  # group: by sim.draft, if that has any
    # of sim.sandboxes; null: as there
    recovery: Literal["none", "replay", "full", "classified"] | None = None


class SimPlan(Section):
    """What mode=plan searches: the fewest GPUs that reach the target."""

    steps_per_hour: Positive | None  # the target, or
    hours: Positive | None  # trainer.steps steps within so many
    dedicated: list[Natural]  # numbers of dedicated rollout workers to try
    borrowed: list[Natural]  # of borrowed workers
    borrowed_price: NotNegative  # of a borrowed GPU, in dedicated ones


class Sim(Section):
    label: str  # of the system that `scheduler`, `pools`, `executor` compose
    pools: list[str]  # that it uses
    executor: Literal["gate", "memory_only", "none"]
    steps: Count
    warmup: Natural  # first steps that no mean counts
    seeds: list[int]
    processes: Count | None  # null: all cores
    n_serving: Natural  # cooperative workers
    dispatch_s: NotNegative  # from a decision to the engine, and as long back
    progress_s: Positive  # between two words about a running turn
    # of rose.sim.hardware.EFFICIENCY, what is to be another value
    efficiency: dict[str, NotNegative]
    delta_ratio: Positive  # bytes of a dense version over those of its differences
    tick_s: Positive  # of the coordinator
    pool: dict[str, SimPool]
    trainer: SimTrainer
    environment: SimEnvironment
    serving: SimServing
    spot: SimSpot
    sandboxes: SimSandboxes
    draft: SimDraft
    systems: dict[str, SimSystem]  # the rivals
    plan: SimPlan
