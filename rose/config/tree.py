"""The types of conf/: what each key may be. No key has a default outside the YAML of conf/.

Left out: what keys must be to each other (checks/), and what the arguments of an environment,
algorithm, policy or recipe may be, which those say themselves.
"""

from __future__ import annotations

import math
from pathlib import Path
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
from rose.config.sim import Sim


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
    # of a mixture, in each layer; 0: dense, and `intermediate` is the MLP's
    experts: int = 0
    experts_per_token: int = 0
    expert_intermediate: int = 0

    @property
    def mlp_width(self) -> int:
        """Intermediate channels that a token goes through in a layer."""
        return self.experts_per_token * self.expert_intermediate or self.intermediate

    @property
    def parameters(self) -> int:
        return self._parameters(self.experts * self.expert_intermediate or self.intermediate)

    @property
    def active_parameters(self) -> int:
        """Those that a token meets."""
        return self._parameters(self.mlp_width)

    def _parameters(self, width: int) -> int:
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        block = attention + self.hidden * (3 * width + self.experts + 2)
        embeddings = self.vocab * self.hidden * (1 if self.tied_embeddings else 2)
        return self.layers * block + embeddings + self.hidden

    @property
    def expert_bytes(self) -> int:
        """Of the number of an expert, where a token's are recorded."""
        return 1 if self.experts <= 256 else 2

    @property
    def projections(self) -> dict[str, tuple[int, int]]:
        """(rows, columns) of each matrix of a layer, or expert, by its Hugging Face name."""
        h, i = self.hidden, self.expert_intermediate or self.intermediate
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        attention = {"q_proj": (queries, h), "k_proj": (keys, h), "v_proj": (keys, h)}
        return attention | {
            "o_proj": (h, queries),
            "gate_proj": (i, h),
            "up_proj": (i, h),
            "down_proj": (h, i),
        }

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of KV cache per token at 2 bytes an element, all layers."""
        return 2 * 2 * self.layers * self.kv_heads * self.head_dim


class Model(Section):
    """`path` is an HF folder or hub id. `source` says how to get it if it is absent: `folder` (it
    must be there), `hub` (the launcher downloads `revision`, a branch, tag or commit), or the name
    of a recipe in scripts/ that makes it in the user's cache (`tiny`, `smollm2`), with `recipe` as
    its arguments. `snapshot` is the folder that the launcher found for a hub id; it is no key of
    conf/."""

    name: str
    source: Literal["folder", "hub", "tiny", "smollm2"]
    path: str | None
    recipe: dict[str, Any]
    dtype: Literal["float32", "bfloat16"]
    max_context: Count
    shape: ModelShape | None
    chat_template_args: dict[str, Any]
    # how tool calls and thoughts are written: auto, hermes, or the name of a parser of vLLM's
    tool_format: str = "auto"
    reasoning_format: str = "auto"
    revision: str | None = None
    snapshot: str | None = None


class Env(Section):
    """One environment. It is its own only member, under its own name: nobody need ask which kind a
    run has."""

    name: str
    args: dict[str, Any]
    max_turns: Count
    max_new_tokens: Count  # per turn
    step_timeout_s: Positive
    max_failures_in_row: Count

    @property
    def members(self) -> dict[str, Env]:
        return {self.name: self}

    @property
    def weights(self) -> dict[str, float]:
        return {self.name: 1.0}

    def key_of(self, member: str) -> str:
        """Where in the tree the member's keys are."""
        return "env"


class Member(Env):
    """One environment of a mixture."""

    weight: Positive  # its share of the groups is this by the sum over all members


class Mixture(Section):
    """Several environments; each group of trajectories is of one. A member's name is its domain to
    scheduling policies and in metrics."""

    name: Literal["mixture"]
    members: dict[str, Member]

    @property
    def weights(self) -> dict[str, float]:
        return {name: member.weight for name, member in self.members.items()}

    @property
    def max_new_tokens(self) -> int:
        """The most that a turn of any member may have."""
        return max(member.max_new_tokens for member in self.members.values())

    @property
    def step_timeout_s(self) -> float:
        """Of the slowest member."""
        return max(member.step_timeout_s for member in self.members.values())

    def key_of(self, member: str) -> str:
        return f"env.members.{member}"


class Algorithm(Section):
    """`name` is a file of rose/trainer/algorithms; `args` are its constructor's."""

    name: str
    args: dict[str, Any]
    # truncated importance sampling between engine and trainer; null: off
    importance_cap: Positive | None
    dynamic_sampling: bool  # drop groups whose rewards are all equal and sample others (DAPO)
    kl_coef: NotNegative  # of the KL penalty to the model folder's own weights; 0: no reference


class Reward(Section):
    """Who says what an episode is worth. `name` is a kind of rose/reward/scorers.py, `args` are its
    constructor's; environment needs no workers."""

    name: str
    args: dict[str, Any]
    ranks: Count  # CPU ranks of the run, each with a pool of workers
    min_workers: Natural  # of each rank
    max_workers: Count
    # Slurm jobs of the run that compute rewards besides, while its workers have more than they can
    max_jobs: Natural
    per_worker: Count  # scores that a worker computes at once
    idle_s: Positive  # after which a worker that isn't needed ends
    timeout_s: Positive  # of one score
    adaptive: bool  # less, once a prompt has a correct answer: RollPacker's limit
    deadline_s: Positive  # from the end of an episode to its score, waiting and retries included
    success_from: float  # a reward from here on is a success, where the scorer doesn't judge it

    @property
    def pools(self) -> int:
        """Ranks that there are."""
        return 0 if self.name == "environment" else self.ranks

    @property
    def environment_weight(self) -> float:
        """Of the environment's own reward in what an episode is worth; 0: it has no part in it."""
        parts = self.args["parts"].values() if self.name == "sum" else [{"name": self.name}]
        return sum(part.get("weight", 1.0) for part in parts if part["name"] == "environment")


class Optimizer(Section):
    lr: Positive
    betas: list[float]
    eps: Positive
    weight_decay: NotNegative
    warmup_steps: Natural  # updates
    grad_clip: Positive
    # after warm-up, to the last update of trainer.steps (rose/trainer/schedule.py)
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    final_share: Fraction = 0.0  # of lr, at the end of linear and cosine


# projections of a layer, in vLLM's order -> vLLM's layer that has them, wrapped as a whole
FUSED = {
    "q_proj": "qkv_proj",
    "k_proj": "qkv_proj",
    "v_proj": "qkv_proj",
    "o_proj": "o_proj",
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
    "down_proj": "down_proj",
}
SLOT_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # of vLLM 0.32 (its MaxLoRARanks)


class Lora(Section):
    """An adapter (arXiv 2106.09685): beside each matrix W of the `targets` of all layers stand A
    (rank, columns) and B (rows, rank), and W x becomes W x + scale B A x. W is frozen."""

    rank: Count
    alpha: Positive
    targets: list[str]  # of `FUSED`

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    @property
    def slot_rank(self) -> int:
        """That of an engine's memory for the adapter. Raises `StopIteration` above vLLM's
        largest, which checks/ refuses."""
        return next(rank for rank in SLOT_RANKS if rank >= self.rank)

    @property
    def layers(self) -> list[str]:
        """vLLM's layers that have targets."""
        return sorted({FUSED[target] for target in self.targets})

    def parameters(self, shape: ModelShape) -> int:
        """Elements of the adapter."""
        return self._elements(shape, self.targets, self.rank)

    def slot_parameters(self, shape: ModelShape) -> int:
        """Elements of an engine's memory for it."""
        held = [name for name, layer in FUSED.items() if layer in self.layers]
        return self._elements(shape, held, self.slot_rank)

    def _elements(self, shape: ModelShape, projections: list[str], rank: int) -> int:
        return shape.layers * rank * sum(sum(shape.projections[name]) for name in projections)


class Trainer(Section):
    ranks: Count
    steps: Count
    batch_size: Count  # trajectories per training step
    zero_stage: Literal[0, 1, 2, 3]
    offload_optimizer: bool
    dtype: Literal["float32", "bfloat16"]
    # in which ranks add up their gradients; kept and applied in float32
    reduce_dtype: Literal["float32", "bfloat16"]
    optimizer: Optimizer
    updates_per_step: Count  # optimizer updates per batch (PPO mini-batches)
    micro_batch_tokens: (
        Count  # of one forward pass: padded ones, or distinct ones when prefixes are shared
    )
    share_prefixes: (
        bool  # compute what rows have in common at their beginning once, where that is cheaper
    )
    gradient_checkpointing: bool
    step_timeout_s: Positive  # one training step, or one checkpoint, of every rank
    checkpoint_every: Count
    checkpoint_keep: Count
    export_every: Natural  # steps from one model's folder in exports/ to the next; 0: none
    export_keep: Count  # of these folders, the newest
    threads: Count | None
    lora: Lora | None = None  # null: all weights; absent in what earlier releases stored
    # compute gradients of the step's finished groups while others still run; absent in what
    # earlier releases stored
    stream: bool = False
    # of a mixture: the engine's experts for each token, recorded with it; absent as above
    router_replay: bool = False
    # both absent there, too: ranks that compute a row together; the layers' inputs in host memory
    sequence_parallel: Count = 1
    offload_activations: bool = False

    @property
    def replicas(self) -> int:
        """Parts into which a batch's rows are dealt."""
        return self.ranks // self.sequence_parallel


class Branching(Section):
    """Training groups as trees: a trajectory goes on as several from a turn on. The trajectories
    of a group stay rollout.group_size, so it begins as that by the product of `ways`."""

    ways: list[Count]  # of each fork, one after the other; []: nothing forks
    at: list[Count] | None  # the turn before which each fork is; null: drawn for each tree
    depth: Count  # the last of the turns that are drawn

    @property
    def leaves(self) -> int:
        """Trajectories of a tree."""
        return math.prod(self.ways)


class Draft(Section):
    """Speculative decoding. `method`: of ours (group), or of vLLM's own (suffix, ngram)."""

    method: Literal["none", "group", "suffix", "ngram"]
    tokens: Count  # drafted at once for a request, at most
    adaptive: bool  # group: as many as pay, and none where none does; false: all that there are
    memory_mib: Count  # group: of an engine, for what groups have said


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
    host_restarts: Natural  # of an environment host's process, without a turn in between
    # After a restart trajectories under way go on from their recorded turns, if the weights that
    # made them are at most so many versions old, by which the staleness of asynchronous policies
    # may then pass its bound; null: they begin anew.
    resume_turns: Natural | None
    replay: str | None  # train from the trajectories saved by another run instead of rolling out
    engine_args: dict[str, Any]  # passed to vLLM as they are
    branch: Branching = Branching([], None, 1)  # absent in what earlier releases stored
    draft: Draft = Draft("none", 8, True, 256)  # so is this


class EvalSet(Env):
    """Held-out tasks of one more environment, trained or not. Its name is its domain, as a
    mixture's member's."""

    episodes: Count  # tasks
    samples: Count | None = None  # of each; null: eval.samples
    temperature: NotNegative | None = None  # null: eval.temperature


class EarlyStop(Section):
    """When the held-out mean reward (`rose.observe.held_out.score`) no longer grows."""

    patience: Natural  # evaluations in a row without a better one; 0: the run never stops early
    min_gain: NotNegative  # by which one is better


class Eval(Section):
    episodes: Natural  # tasks of the run's own environments
    every: Natural  # steps; 0: only before and after
    temperature: NotNegative
    seed: int
    samples: Count = 1
    beside: bool = False  # training doesn't wait for those between steps
    keep_best: bool = False
    stop: EarlyStop = EarlyStop(patience=0, min_gain=0.0)
    sets: dict[str, EvalSet] = {}

    def of(self, domain: str) -> tuple[int, float]:
        """(samples of each task, their temperature)."""
        own = self.sets.get(domain)
        samples, temperature = (own.samples, own.temperature) if own else (None, None)
        return (
            self.samples if samples is None else samples,
            self.temperature if temperature is None else temperature,
        )

    def due(self, step: int, last: int) -> bool:
        """Before the first step, after the last, and each `every`."""
        between = self.every > 0 and step % self.every == 0
        return (self.episodes > 0 or bool(self.sets)) and (step in (0, last) or between)


class Transfer(Section):
    """How policy versions get from the trainer to the engines (docs/format.md)."""

    full_every: (
        Count  # versions from one that needs no base to the next; between them are differences
    )
    keep_versions: Count  # that readers may still be on their way to
    # degrees of servers, rollout.tensor_parallel aside, that read only their part
    tensor_parallel: list[Count]
    broadcast: Literal["auto", "mpi", "nccl", "none"]  # to dedicated ranks; auto: mpi
    # What requests do that run when new weights come. Null only until the tree is checked: keep
    # with asynchronous batching, as making every context's KV cache anew costs a prefill of all of
    # them per version; else recompute.
    in_flight: Literal["recompute", "keep", "finish"] | None
    # http://host:port of a relay that this process reads versions from; null: the shared folder
    relay: str | None
    relay_token_file: str | None
    threads: (
        Count | None
        # that encode or decode; null: the trainer's or the engine's, or
        # rose.processes.usable_threads
    )
    # of a node's memory for what is broadcast to its dedicated ranks; what is more, they read from
    # files
    mirror_gib: Positive
    stage_gib: (
        NotNegative  # of blocks that change so much that they are staged whole, per engine rank
    )
    # of a GPU for what a version changes, at most, and within what is free; more waits on the
    stage_device_gib: Positive
    # host and makes the pause longer
    verify_every: Count  # versions within which each live block is read back and compared whole
    load_timeout_s: Positive


class Slo(Section):
    """Latency targets of one online model: time to first token, and mean time per output token
    after it; seconds."""

    ttft_p50_s: Positive
    ttft_p99_s: Positive
    tpot_p50_s: Positive
    tpot_p99_s: Positive


class Online(Section):
    """The online server beside a borrowed engine: vLLM's OpenAI-compatible one."""

    # folder or hub id; null: no server of ours beside it, the whole device is lent
    model: str | None
    served_name: str | None  # as clients call it; null: the model as given
    host: str
    port: Natural  # 0: a free one, printed at start
    dtype: Literal["auto", "float32", "bfloat16", "float16"]
    max_context: Count
    max_sequences: Count
    max_batched_tokens: Count
    kv_cache_gib: Positive
    engine_args: dict[str, Any]  # of vLLM, as they are
    start_timeout_s: Positive
    slo: Slo | None  # null: unknown, so nothing is lent


class Lending(Section):
    """When and how much of the device the online engine lends to the rollout engine."""

    # file of python -m rose.lending.profile for this device and these models; null: lend nothing
    profile: str | None
    chunk_tokens: Count  # the most that one step of the rollout engine takes in
    # of ttft_p99_s that a rollout step may hold up a request that comes just after, at most
    step_share: Share
    priority: Literal["idle", "normal"]  # of the rollout engine's threads, on a CPU
    # the device's KV memory, one budget for both; null: online.kv_cache_gib
    kv_gib: Positive | None
    reserve: Share  # of it that is never lent, beyond what online requests use
    high_watermark: Share  # of it in use or lent: above, the rollout engine's budget is halved
    stale_after_s: Positive  # an online engine silent for so long lends nothing
    revoke_after_s: Positive  # a rollout engine that has not given back by then is killed
    patience_s: Positive  # turns held up at the gate for so long go back to the scheduler
    # "22-06": share of what could be lent, local time; hours not named: all of it
    hours: dict[str, NotNegative]
    control_port: Natural  # of metrics, report and stop switch; 0: a free one, printed at start
    stop_file: str | None  # while it exists nothing is lent


class Serving(Section):
    """Ranks of serving jobs that join the run while it runs."""

    borrow: bool  # whether they may
    # what such a rank says it is; provisioning tells them apart
    kind: Literal["cooperative", "spot", "serverless"]
    max_ranks: Natural  # at once; 0: none
    heartbeat_s: Positive  # between two signs of life, both ways
    lost_after_s: Positive  # of silence: its turns go elsewhere
    drain_s: NotNegative  # a rank asked to leave politely (SIGUSR2) finishes its turns for so long
    wait_s: Positive  # a serving rank waits for its run so long, then ends
    online: Online
    lending: Lending


class Mpi(Section):
    """How this site starts MPI ranks and what it must find in their environment."""

    name: str
    # whether processes of other jobs can join at run time, and the run survives their death
    join: bool
    srun: list[str]  # options of srun that start ranks as one MPI world
    env: dict[str, str]
    # besides, for the processes at both ends of a borrowed rank's connection
    join_env: dict[str, str]


class Component(Section):
    """One component of a Slurm heterogeneous job: sbatch's options of these names; null leaves one
    out."""

    nodes: Count | None  # null: as few as its GPUs need; 1 without GPUs
    gpus_per_node: Count  # that the nodes have; used when cluster.gpus > 0
    cpus_per_task: Count | None  # null: of an engine, 8 and 2 for each of its GPUs
    partition: str | None
    account: str | None
    qos: str | None
    constraint: str | None
    mem: str | Count | None  # per node, as Slurm writes it: 64G, or MiB
    time: str | Count | None  # as Slurm writes it: 2-00:00:00, or minutes
    exclusive: bool  # its nodes are shared with no other job, nor with another component
    sbatch: list[str]  # further options, such as "--mail-type=END"


class Container(Section):
    """In which the ranks of a Slurm job run."""

    runtime: Literal["apptainer", "singularity", "pyxis"]  # pyxis: srun --container-image
    image: str  # a .sif or .sqsh file that all nodes see, or what the runtime can pull
    python: str  # inside: the interpreter that has ROSE's packages
    # besides output_dir, model and this checkout: "/scratch", or "/host/path:/path/inside"
    mounts: list[str]
    args: list[str]  # further options of the runtime, such as "--no-home"


class Slurm(Section):
    trainer: Component  # trainer ranks, environment hosts and the coordinator
    rollout: Component  # the engines
    # a job with one more engine, which the run asks for itself (scheduler/provisioning=on_demand)
    borrowed: Component
    # a job that computes rewards (reward.max_jobs): a worker for each of its CPUs
    reward: Component
    pending_s: Positive  # such a job may wait in the queue for so long; then it counts as refused
    setup: list[str]  # shell lines at the job's start, such as "module load cuda"
    container: Container | None
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
    # of the network that all hosts share, for MPI, gloo and NCCL; null: found by trying
    interface: str | None
    # of compiled kernels, on a disk of the node; null: TMPDIR/rose-UID under Slurm
    cache_dir: str | None
    env: dict[str, str]
    mpi: Mpi
    slurm: Slurm | None  # with kind=slurm

    @property
    def of_interface(self) -> dict[str, str]:
        """Variables by which gloo, NCCL (for which a bare name is a prefix) and libfabric's tcp
        provider take it."""
        if not self.interface:
            return {}
        return {
            "GLOO_SOCKET_IFNAME": self.interface,
            "NCCL_SOCKET_IFNAME": f"={self.interface}",
            "FI_TCP_IFACE": self.interface,
        }


class Checkpoints(Section):
    """Of the sandboxes of environments that have some: after which turns what is captured, and
    where it lies."""

    # classified: what a turn changed (Crab); full: all after each turn; files: without processes
    checkpoints: Literal["none", "classified", "full", "files"]
    store: str | None  # a folder that all hosts share; null: sandboxes in the run's folder
    local: str | None  # one on the node's own disk; null: below TMPDIR
    bytes_per_s: NotNegative  # of a host, to `store`; 0: no bound
    memory_mib: Count  # captures of a host that wait to be packed; beyond, turns are skipped
    keep: Natural  # newest checkpoints of a sandbox; 0: all


class Wandb(Section):
    """Weights & Biases, off without a project."""

    project: str | None
    entity: str | None  # null: the account's own
    mode: Literal["online", "offline"]  # offline: into the run's folder, for `wandb sync`
    group: str | None
    tags: list[str]


class Mlflow(Section):
    """MLflow, off without a URI."""

    uri: str | None  # of the tracking server, as http://host:5000, or a folder, as file:///runs
    experiment: str


class Observe(Section):
    tensorboard: bool
    trace: bool
    report: bool
    terminal: bool
    save_trajectories: bool
    wandb: Wandb
    mlflow: Mlflow


class Config(Section):
    name: str
    mode: Literal["train", "simulate", "plan"]
    seed: int
    deterministic: bool
    # trainer and engines share the same GPUs (or cores) in turn; None: where there is one GPU
    colocate: bool | None
    fresh: bool  # move an earlier run of this name aside instead of continuing it
    output_dir: str
    model: Model
    env: Env
    reward: Reward
    algorithm: Algorithm
    trainer: Trainer
    rollout: Rollout
    eval: Eval
    transfer: Transfer
    serving: Serving
    scheduler: Scheduler
    cluster: Cluster
    sandbox: Checkpoints
    observe: Observe
    sim: Sim

    @property
    def environments(self) -> dict[str, tuple[str, Env]]:
        """domain -> (the key of its section, the environment), of training and evaluation."""
        trained = {name: (self.env.key_of(name), env) for name, env in self.env.members.items()}
        return trained | {name: (f"eval.sets.{name}", env) for name, env in self.eval.sets.items()}

    @property
    def step_timeout_s(self) -> float:
        """Of the slowest environment."""
        return max(env.step_timeout_s for _, env in self.environments.values())

    @property
    def shares_devices(self) -> bool:
        """Whether trainer and engines take turns: a run without engines has nobody to share with,
        and one GPU of one machine can't be had otherwise."""
        alone = self.cluster.gpus == 1 and self.cluster.kind == "local"
        return (alone if self.colocate is None else self.colocate) and self.rollout.replay is None

    @property
    def borrows(self) -> bool:
        """Whether serving ranks may join: wanted, possible with this MPI, and not against
        `deterministic`."""
        return self._would_borrow and self.cluster.mpi.join

    @property
    def moves_trajectories(self) -> bool:
        """Whether environment hosts tell what the scheduler decides moves by."""
        return self.scheduler.placement.name != "stay"

    @property
    def _would_borrow(self) -> bool:
        return self.serving.borrow and self.rollout.replay is None and not self.deterministic

    @property
    def why_not_borrowed(self) -> str:
        """In words, what is lost when serving ranks are wanted and this MPI can't let them in; else
        empty."""
        if self.borrows or not self._would_borrow:
            return ""
        return (
            f"cluster.mpi.join=false (of {self.cluster.mpi.name}): serving ranks can't join, so "
            f"the run has its {self.rollout.workers} dedicated rollout ranks only; serving=none "
            "says that this is meant"
        )

    @property
    def run_dir(self) -> Path:
        return Path(self.output_dir) / self.name


class MixedConfig(Config):
    """The tree of a run on a mixture of environments: a class of its own, as msgspec tells structs
    in one place apart by a tag only, which a single environment's stored configuration doesn't
    have."""

    env: Mixture


def cpus_of(component: Component, rollout: Rollout) -> int:
    """CPUs of each rank of a component. An engine has its scheduler, its tokens' way out and the
    threads that stage new weights, and for each GPU a worker process with its copying threads."""
    return component.cpus_per_task or 8 + 2 * rollout.tensor_parallel


def nodes_of(component: Component, gpus: int, on_gpu: bool) -> int:
    """Nodes of a component whose ranks use so many GPUs."""
    if component.nodes is not None:
        return component.nodes
    return -(-gpus // component.gpus_per_node) if on_gpu else 1
