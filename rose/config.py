"""One typed tree for all of conf/, validated once, before anything starts.

`from_dict` turns the composed Hydra tree into a frozen `Config` or raises `ConfigError`, whose text
names the key, its value and what would be right. Nothing else reads the YAML of conf/, and no key has a default
outside it. What the arguments of an environment, algorithm, policy or recipe may be, those say themselves.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from rose import config_errors
from rose.config_errors import ConfigError as ConfigError
from rose.storage import write_whole

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


def from_dict(tree: dict[str, Any]) -> Config:
    """Resolved plain containers -> checked `Config`. Raises `ConfigError`."""
    try:
        config = msgspec.convert(tree, Config)
    except msgspec.ValidationError as error:
        raise ConfigError(config_errors.explain(str(error), tree, Config)) from None
    _check(config)
    return config


def to_dict(config: Config) -> dict[str, Any]:
    return msgspec.to_builtins(config)


def keys() -> list[str]:
    """Every key of the tree, dotted, sections included."""
    return config_errors.keys(Config)


def load(path: Path) -> Config:
    """Read the resolved config that `save` wrote into a run's folder."""
    return from_dict(json.loads(Path(path).read_text()))


def save(config: Config, path: Path) -> None:
    write_whole(Path(path), (json.dumps(to_dict(config), indent=2) + "\n").encode(), sync=True)


Need = Callable[[bool, str, str], None]  # (is it so?, key, what would be right)


def _check(c: Config) -> None:
    """Everything that can be said without looking at the machine or the model."""
    tree = to_dict(c)

    def need(ok: bool, key: str, remedy: str) -> None:
        if not ok:
            raise ConfigError(f"{key}={config_errors.value_at(tree, key)!r}: {remedy}")

    for key, value in _leaves(tree):
        need(not isinstance(value, float) or math.isfinite(value), key, "must be a finite number")
    _check_values(c, need)
    _check_batch(c, need)
    _check_machine(c, need)


def _leaves(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every value of the tree with its dotted key."""
    if isinstance(tree, (dict, list)):
        for name, branch in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from _leaves(branch, f"{prefix}.{name}" if prefix else str(name))
    else:
        yield prefix, tree


def _check_values(c: Config, need: Need) -> None:
    """Single values that their types don't bound."""
    need(re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._,=+-]{0,150}", c.name) is not None, "name",
         "letters, digits and . _ , = + - only, at most 151 of them; it names the run's folder")
    need(len(c.trainer.optimizer.betas) == 2 and all(0 <= b < 1 for b in c.trainer.optimizer.betas),
         "trainer.optimizer.betas", "two numbers in [0, 1)")
    need(c.rollout.temperature > 0, "rollout.temperature", "must be greater than 0: greedy rollouts teach nothing")
    need(c.serving.lost_after_s >= 2 * c.serving.heartbeat_s, "serving.lost_after_s",
         f"at least twice serving.heartbeat_s={c.serving.heartbeat_s:g}, or a late heartbeat is a loss")
    need(c.model.source != "folder" or c.model.path is not None, "model.path",
         "the model's folder is needed (model.source=folder)")


def _check_batch(c: Config, need: Need) -> None:
    """Trajectories of a step among groups, ranks and updates; tokens of a trajectory among turns and passes."""
    need(c.trainer.batch_size % c.rollout.group_size == 0, "trainer.batch_size",
         f"must be a multiple of rollout.group_size={c.rollout.group_size}; "
         f"try {max(1, round(c.trainer.batch_size / c.rollout.group_size)) * c.rollout.group_size}")
    need(c.trainer.batch_size >= c.trainer.ranks * c.trainer.updates_per_step, "trainer.batch_size",
         f"must give each of trainer.ranks={c.trainer.ranks} ranks at least one trajectory in each of "
         f"trainer.updates_per_step={c.trainer.updates_per_step} updates")
    need(c.env.max_new_tokens < c.model.max_context, "env.max_new_tokens",
         f"one turn must fit into model.max_context={c.model.max_context}")
    need(c.trainer.micro_batch_tokens >= c.model.max_context, "trainer.micro_batch_tokens",
         f"must hold one trajectory of model.max_context={c.model.max_context} tokens")


def _check_machine(c: Config, need: Need) -> None:
    """GPUs and ranks. A run that trains from saved trajectories has neither engines nor environment hosts."""
    rolls = c.rollout.replay is None
    engines, hosts = (c.rollout.workers, c.rollout.environment_hosts) if rolls else (0, 0)
    if c.deterministic:
        need(engines <= 1, "rollout.workers", "deterministic=true needs one engine: rollout.workers=1")
        need(c.trainer.dtype == "float32", "trainer.dtype", "deterministic=true needs float32")
    gpus = c.trainer.ranks + engines * c.rollout.tensor_parallel
    need(c.cluster.gpus == 0 or gpus <= c.cluster.gpus, "cluster.gpus",
         f"the run needs {gpus} (trainer.ranks={c.trainer.ranks} + {engines} engines x rollout.tensor_parallel="
         f"{c.rollout.tensor_parallel}); raise it or run fewer")
    ranks = 1 + hosts + c.trainer.ranks + engines
    need(c.cluster.slots is None or ranks <= c.cluster.slots, "cluster.slots",
         f"the run has {ranks} ranks (1 coordinator + {hosts} environment hosts + {c.trainer.ranks} trainer + "
         f"{engines} rollout); raise it or run fewer")
    _check_mpi(c.cluster.mpi, need)
    if c.scheduler.provisioning.name == "on_demand":
        need(c.cluster.kind == "slurm", "scheduler.provisioning.name", "on_demand submits jobs to Slurm: cluster=slurm")
        need(c.cluster.mpi.join, "cluster.mpi.join", f"with {c.cluster.mpi.name} no rank can join, and scheduler."
             "provisioning.name='on_demand' asks for such ranks; another cluster/mpi=, or scheduler/provisioning=fixed")
        need(c.borrows, "scheduler.provisioning.name", "on_demand needs ranks that may join: serving.borrow=true, "
             "deterministic=false, no replay")
    if c.cluster.kind == "slurm":
        need(c.cluster.slurm is not None, "cluster.slurm", "cluster.kind=slurm needs it; use cluster=slurm")
        _check_slurm(c, engines, need)


def _check_mpi(mpi: Mpi, need: Need) -> None:
    """Options and variables that srun and the system take as they are."""
    for at, option in enumerate(mpi.srun):
        need(option.startswith("-") and option.isprintable(), f"cluster.mpi.srun.{at}",
             "must be an option, as --mpi=pmi2")
    for section, variables in (("env", mpi.env), ("join_env", mpi.join_env)):
        for name, value in variables.items():
            need(re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name) is not None and value.isprintable(),
                 f"cluster.mpi.{section}.{name}", "must be the name of a variable, and one line of text")


def _check_slurm(c: Config, engines: int, need: Need) -> None:
    """Ranks divide evenly over the nodes of their component, and nothing in an option can end its line."""
    parts = (("trainer", c.cluster.slurm.trainer, "trainer.ranks", c.trainer.ranks, 1),
             ("rollout", c.cluster.slurm.rollout, "rollout.workers", engines, c.rollout.tensor_parallel))
    for name, component, key, ranks, gpus in parts:
        nodes = nodes_of(component, ranks * gpus, c.cluster.gpus > 0)
        need(ranks % nodes == 0, f"cluster.slurm.{name}.nodes",
             f"{key}={ranks} ranks don't divide evenly over {nodes} nodes; change one of them")
        need(not c.cluster.gpus or ranks // nodes * gpus <= component.gpus_per_node,
             f"cluster.slurm.{name}.gpus_per_node",
             f"{ranks // nodes} ranks x {gpus} GPUs don't fit on a node; raise cluster.slurm.{name}.nodes={nodes}")
    need(c.cluster.slurm.borrowed.nodes in (None, 1), "cluster.slurm.borrowed.nodes", "such a job is one engine: 1")
    for name in ("trainer", "rollout", "borrowed"):
        for at, option in enumerate(getattr(c.cluster.slurm, name).sbatch):
            need(option.startswith("--"), f"cluster.slurm.{name}.sbatch.{at}", "must be an option, as --exclusive")
    for key, value in _leaves(msgspec.to_builtins(c.cluster.slurm)):
        need(not isinstance(value, str) or value.isprintable() and value != "", f"cluster.slurm.{key}",
             "must be one line of text, not empty; null leaves an option out")


def nodes_of(component: Component, gpus: int, on_gpu: bool) -> int:
    """Nodes of a component whose ranks use so many GPUs."""
    if component.nodes is not None:
        return component.nodes
    return -(-gpus // component.gpus_per_node) if on_gpu else 1


def check_model(c: Config, shape: ModelShape) -> None:
    """Checks that need the model's shape. Raises `ConfigError`."""
    if c.rollout.replay is not None:
        return  # no engines, and all of them are about engines
    tp = c.rollout.tensor_parallel
    if shape.heads % tp:
        raise ConfigError(f"rollout.tensor_parallel={tp}: must divide the {shape.heads} attention heads of model "
                          f"{c.model.name}")
    if max(shape.kv_heads, tp) % min(shape.kv_heads, tp):
        raise ConfigError(f"rollout.tensor_parallel={tp}: must divide, or be a multiple of, the {shape.kv_heads} "
                          f"key-value heads of model {c.model.name}")
    if shape.intermediate % tp:
        raise ConfigError(f"rollout.tensor_parallel={tp}: must divide the intermediate size {shape.intermediate} of "
                          f"model {c.model.name}")
    if c.cluster.gpus == 0 and tp > 1:
        raise ConfigError(f"rollout.tensor_parallel={tp}: needs GPUs, and cluster.gpus=0")


def read_shape(folder: Path) -> ModelShape:
    """Shape from an HF folder's config.json. Raises `ConfigError` when it is absent or unreadable."""
    path = Path(folder) / "config.json"
    try:
        raw = json.loads(path.read_text())
        heads = raw["num_attention_heads"]
        return ModelShape(
            layers=raw["num_hidden_layers"], hidden=raw["hidden_size"], intermediate=raw["intermediate_size"],
            heads=heads, kv_heads=raw.get("num_key_value_heads", heads),
            head_dim=raw.get("head_dim") or raw["hidden_size"] // heads, vocab=raw["vocab_size"],
            tied_embeddings=raw.get("tie_word_embeddings", False))
    except FileNotFoundError:
        raise ConfigError(f"model.path={str(folder)!r}: no config.json there; give the folder of a Hugging Face "
                          "model") from None
    except (KeyError, json.JSONDecodeError) as error:
        raise ConfigError(f"model.path={str(folder)!r}: config.json is no decoder model's ({error!r})") from None
