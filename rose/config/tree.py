"""The types of conf/: what each key may be. No key has a default outside the YAML of conf/.

Left out: what keys must be to each other (checks.py), and what the arguments of an environment, algorithm, policy or
recipe may be, which those say themselves.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

Count = Annotated[int, Meta(ge=1)]
Natural = Annotated[int, Meta(ge=0)]
Positive = Annotated[float, Meta(gt=0)]
NotNegative = Annotated[float, Meta(ge=0)]
Share = Annotated[float, Meta(gt=0, le=1)]


class Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    pass


class ModelShape(Section):
    """The numbers of a decoder's config.json that planning needs; read from the folder if null."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied_embeddings: bool

    @property
    def parameters(self) -> int:
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        block = attention + 3 * self.hidden * self.intermediate + 2 * self.hidden
        embeddings = self.vocab * self.hidden * (1 if self.tied_embeddings else 2)
        return self.layers * block + embeddings + self.hidden

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of KV cache per token at 2 bytes an element, all layers."""
        return 2 * 2 * self.layers * self.kv_heads * self.head_dim


class Model(Section):
    """`path` is an HF folder or hub id. `source` says how to get it if it is absent: `folder` (it must
    be there), `hub` (transformers downloads it), or the name of a recipe in scripts/ that makes it in
    the user's cache (`tiny`, `smollm2`), with `recipe` as its arguments."""

    name: str
    source: Literal["folder", "hub", "tiny", "smollm2"]
    path: str | None
    recipe: dict[str, Any]
    dtype: Literal["float32", "bfloat16"]
    max_context: Count
    shape: ModelShape | None
    chat_template_args: dict[str, Any]


class Env(Section):
    name: str
    args: dict[str, Any]
    max_turns: Count
    max_new_tokens: Count  # per turn
    step_timeout_s: Positive
    max_failures_in_row: Count


class Algorithm(Section):
    """`name` is a file of rose/trainer/algorithms; `args` are its constructor's."""

    name: str
    args: dict[str, Any]
    importance_cap: Positive | None  # truncated importance sampling between engine and trainer; null: off
    dynamic_sampling: bool  # drop groups whose rewards are all equal and sample others (DAPO)


class Optimizer(Section):
    lr: Positive
    betas: list[float]
    eps: Positive
    weight_decay: NotNegative
    warmup_steps: Natural
    grad_clip: Positive


class Trainer(Section):
    ranks: Count
    steps: Count
    batch_size: Count  # trajectories per training step
    zero_stage: Literal[0, 1, 2, 3]
    offload_optimizer: bool
    dtype: Literal["float32", "bfloat16"]
    optimizer: Optimizer
    updates_per_step: Count  # optimizer updates per batch (PPO mini-batches)
    micro_batch_tokens: Count  # of one forward pass: padded ones, or distinct ones when prefixes are shared
    share_prefixes: bool  # compute what rows have in common at their beginning once, where that is cheaper
    gradient_checkpointing: bool
    step_timeout_s: Positive  # one training step, or one checkpoint, of every rank
    checkpoint_every: Count
    checkpoint_keep: Count
    threads: Count | None


class Rollout(Section):
    workers: Count
    tensor_parallel: Count
    group_size: Count
    max_sequences: Count  # running at once in one engine
    max_batched_tokens: Count
    kv_cache_gib: Positive | None  # null: what gpu_memory_utilization leaves
    gpu_memory_utilization: Share
    prefix_caching: bool
    enforce_eager: bool
    stream_interval: Count  # tokens between two words about a running turn
    environment_hosts: Count
    temperature: float
    top_p: Share
    top_k: Natural
    threads: Count | None
    engine_start_timeout_s: Positive
    turn_timeout_s: Positive
    engine_restarts: Natural  # of one worker, over the run
    replay: str | None  # train from the trajectories saved by another run instead of rolling out
    engine_args: dict[str, Any]  # passed to vLLM as they are


class Eval(Section):
    episodes: Natural
    every: Natural  # steps; 0: only before and after
    temperature: NotNegative
    seed: int


class Transfer(Section):
    keep_versions: Count
    load_timeout_s: Positive


class Policy(Section):
    name: str
    args: dict[str, Any]


class Scheduler(Section):
    provisioning: Policy
    routing: Policy
    order: Policy
    batching: Policy
    queue_depth: NotNegative  # turns sent to a worker beyond its sequences, as a share, to hide dispatch latency


class Serving(Section):
    """Ranks of serving jobs that join the run while it runs."""

    borrow: bool  # whether they may
    max_ranks: Count  # at once
    heartbeat_s: Positive  # between two signs of life, both ways
    lost_after_s: Positive  # of silence: its turns go elsewhere
    drain_s: NotNegative  # a rank asked to leave politely (SIGUSR2) finishes its turns for so long
    wait_s: Positive  # a serving rank waits for its run so long, then ends


class Mpi(Section):
    """How this site starts MPI ranks and what it must find in their environment."""

    name: str
    join: bool  # whether processes of other jobs can join at run time, and the run survives their death
    srun: list[str]  # options of srun that start ranks as one MPI world
    env: dict[str, str]
    join_env: dict[str, str]  # besides, for the processes at both ends of a borrowed rank's connection


class Component(Section):
    """One component of a Slurm heterogeneous job: sbatch's options of these names; null leaves one out."""

    nodes: Count | None  # null: as few as its GPUs need; 1 without GPUs
    gpus_per_node: Count  # that the nodes have; used when cluster.gpus > 0
    cpus_per_task: Count
    partition: str | None
    account: str | None
    qos: str | None
    constraint: str | None
    mem: str | None  # per node, as Slurm writes it: 64G
    time: str | None  # as Slurm writes it: 2-00:00:00, or minutes
    exclusive: bool  # its nodes are shared with no other job, nor with another component
    sbatch: list[str]  # further options, such as "--mail-type=END"


class Slurm(Section):
    trainer: Component  # trainer ranks, environment hosts and the coordinator
    rollout: Component  # the engines
    borrowed: Component  # a job with one more engine, which the run asks for itself (scheduler/provisioning=on_demand)
    pending_s: Positive  # such a job may wait in the queue for so long; then it counts as refused
    setup: list[str]  # shell lines at the job's start, such as "module load cuda"
    warning_s: Count  # so long before its time limit the job saves and requeues itself
    requeues: Natural  # how often at most


class Cluster(Section):
    kind: Literal["local", "slurm"]
    dry_run: bool
    slots: int | None  # ranks that may run here; null: no limit
    gpus: Natural  # GPUs that the run may use; 0: it runs on CPUs
    gpu_memory_gib: Positive | None  # of each; null: memory is not checked
    start_timeout_s: Positive
    stop_timeout_s: Positive
    env: dict[str, str]
    mpi: Mpi
    slurm: Slurm | None  # with kind=slurm


class Observe(Section):
    tensorboard: bool
    trace: bool
    report: bool
    terminal: bool
    save_trajectories: bool


class Config(Section):
    name: str
    mode: Literal["train"]
    seed: int
    deterministic: bool
    fresh: bool  # move an earlier run of this name aside instead of continuing it
    output_dir: str
    model: Model
    env: Env
    algorithm: Algorithm
    trainer: Trainer
    rollout: Rollout
    eval: Eval
    transfer: Transfer
    serving: Serving
    scheduler: Scheduler
    cluster: Cluster
    observe: Observe

    @property
    def borrows(self) -> bool:
        """Whether serving ranks may join: wanted, possible with this MPI, and not against `deterministic`."""
        return self._would_borrow and self.cluster.mpi.join

    @property
    def _would_borrow(self) -> bool:
        return self.serving.borrow and self.rollout.replay is None and not self.deterministic

    @property
    def why_not_borrowed(self) -> str:
        """In words, what is lost when serving ranks are wanted and this MPI can't let them in; else empty."""
        if self.borrows or not self._would_borrow:
            return ""
        return (f"cluster.mpi.join=false (of {self.cluster.mpi.name}): serving ranks can't join, so the run has its "
                f"{self.rollout.workers} dedicated rollout ranks only; serving=none says that this is meant")

    @property
    def run_dir(self) -> Path:
        return Path(self.output_dir) / self.name


def nodes_of(component: Component, gpus: int, on_gpu: bool) -> int:
    """Nodes of a component whose ranks use so many GPUs."""
    if component.nodes is not None:
        return component.nodes
    return -(-gpus // component.gpus_per_node) if on_gpu else 1
