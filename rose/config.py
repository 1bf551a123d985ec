"""One typed tree for all of conf/, validated once, before anything starts.

`from_dict` turns the composed Hydra tree into a frozen `Config` or raises `ConfigError`, whose text
names the key, its value and what would be right. Nothing else in ROSE reads YAML or has defaults of
its own: every default stands in conf/. Checks that need the model's shape are in `check_model`.
"""

from __future__ import annotations

import difflib
import json
import re
from pathlib import Path
from typing import Any, Literal

import msgspec


class ConfigError(ValueError):
    """Bad configuration; the launcher prints it and exits with code 2."""


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
    max_context: int
    shape: ModelShape | None
    chat_template_args: dict[str, Any]


class Env(Section):
    name: str
    args: dict[str, Any]
    max_turns: int
    max_new_tokens: int  # per turn
    step_timeout_s: float
    max_failures_in_row: int


class Algorithm(Section):
    """`name` is a file of rose/trainer/algorithms; `args` are its constructor's."""

    name: str
    args: dict[str, Any]
    importance_cap: float | None  # truncated importance sampling between engine and trainer; null: off
    dynamic_sampling: bool  # drop groups whose rewards are all equal and sample others (DAPO)


class Optimizer(Section):
    lr: float
    betas: list[float]
    eps: float
    weight_decay: float
    warmup_steps: int
    grad_clip: float


class Trainer(Section):
    ranks: int
    steps: int
    batch_size: int  # trajectories per training step
    zero_stage: Literal[0, 1, 2, 3]
    offload_optimizer: bool
    dtype: Literal["float32", "bfloat16"]
    optimizer: Optimizer
    updates_per_step: int  # optimizer updates per batch (PPO mini-batches)
    micro_batch_tokens: int  # padded tokens of one forward pass
    gradient_checkpointing: bool
    step_timeout_s: float  # one training step, or one checkpoint, of every rank
    checkpoint_every: int
    checkpoint_keep: int
    threads: int | None


class Rollout(Section):
    workers: int
    tensor_parallel: int
    group_size: int
    max_sequences: int  # running at once in one engine
    max_batched_tokens: int
    kv_cache_gib: float | None  # null: what gpu_memory_utilization leaves
    gpu_memory_utilization: float
    prefix_caching: bool
    enforce_eager: bool
    stream_interval: int  # tokens between two words about a running turn
    environment_hosts: int
    temperature: float
    top_p: float
    top_k: int
    threads: int | None
    engine_start_timeout_s: float
    turn_timeout_s: float
    engine_restarts: int  # of one worker, over the run
    replay: str | None  # train from the trajectories saved by another run instead of rolling out
    engine_args: dict[str, Any]  # passed to vLLM as they are


class Eval(Section):
    episodes: int
    every: int  # steps; 0: only before and after
    temperature: float
    seed: int


class Transfer(Section):
    full_every: int
    keep_versions: int
    load_timeout_s: float


class Policy(Section):
    name: str
    args: dict[str, Any]


class Scheduler(Section):
    provisioning: Policy
    routing: Policy
    order: Policy
    batching: Policy
    queue_depth: float  # turns sent to a worker beyond its sequences, as a share, to hide dispatch latency


class Mpi(Section):
    """How this site starts MPI ranks and what it must find in their environment."""

    name: str
    env: dict[str, str]


class Cluster(Section):
    kind: Literal["local"]
    dry_run: bool
    slots: int | None  # ranks that may run here; null: no limit
    gpus: int  # GPUs that the run may use; 0: it runs on CPUs
    gpu_memory_gib: float | None  # of each; null: memory is not checked
    start_timeout_s: float
    stop_timeout_s: float
    env: dict[str, str]
    mpi: Mpi


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
    scheduler: Scheduler
    cluster: Cluster
    observe: Observe

    @property
    def run_dir(self) -> Path:
        return Path(self.output_dir) / self.name


def from_dict(tree: dict[str, Any]) -> Config:
    """Resolved plain containers -> checked `Config`. Raises `ConfigError`."""
    try:
        config = msgspec.convert(tree, Config)
    except msgspec.ValidationError as error:
        raise ConfigError(_explain(str(error), tree)) from None
    _check(config)
    return config


def to_dict(config: Config) -> dict[str, Any]:
    return msgspec.to_builtins(config)


def keys(section: type[Section] = Config, prefix: str = "") -> list[str]:
    """Every key of the tree, dotted, sections included."""
    found = []
    for field in msgspec.structs.fields(section):
        found.append(prefix + field.name)
        if isinstance(field.type, type) and issubclass(field.type, Section):
            found += keys(field.type, f"{prefix}{field.name}.")
    return found


def load(path: Path) -> Config:
    """Read the resolved config that `save` wrote into a run's folder."""
    return from_dict(json.loads(Path(path).read_text()))


def save(config: Config, path: Path) -> None:
    Path(path).write_text(json.dumps(to_dict(config), indent=2) + "\n")


def _explain(message: str, tree: dict[str, Any]) -> str:
    """msgspec's 'Expected `int`, got `str` - at `$.trainer.steps`' -> key, value and what would be right."""
    found = re.search(r" - at `\$\.?([^`]*)`$", message)
    text = message[: found.start()] if found else message
    key = found.group(1) if found else ""
    unknown = re.search(r"unknown field `([^`]*)`", text)
    missing = re.search(r"required field `([^`]*)`", text)
    if unknown:
        full = ".".join(filter(None, [key, unknown.group(1)]))
        near = difflib.get_close_matches(full, keys(), n=3, cutoff=0.75)
        meant = f"did you mean {' or '.join(near)}?" if near else "see conf/ for the ones there are"
        return f"{full}={_value(tree, full)!r}: no such key; {meant}"
    if missing:
        return f"{'.'.join(filter(None, [key, missing.group(1)]))}: missing; it has no default in conf/"
    return f"{key}={_value(tree, key)!r}: {text[0].lower()}{text[1:]}"


def _value(tree: Any, dotted: str) -> Any:
    for part in re.findall(r"[^.\[\]]+", dotted):
        if isinstance(tree, dict) and part in tree:
            tree = tree[part]
        elif isinstance(tree, list) and part.isdigit() and int(part) < len(tree):
            tree = tree[int(part)]
        else:
            return None
    return tree


def _check(c: Config) -> None:
    """Everything that can be said without looking at the machine or the model."""

    def need(ok: bool, key: str, remedy: str) -> None:
        if not ok:
            raise ConfigError(f"{key}={_value(to_dict(c), key)!r}: {remedy}")

    need(re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._,=+-]{0,150}", c.name) is not None, "name",
         "letters, digits and . _ , = + - only, at most 151 of them; it names the run's folder")
    for key in ("trainer.ranks", "trainer.steps", "trainer.batch_size", "trainer.updates_per_step",
                "trainer.micro_batch_tokens", "trainer.checkpoint_every", "trainer.checkpoint_keep",
                "rollout.workers", "rollout.tensor_parallel", "rollout.group_size", "rollout.max_sequences",
                "rollout.max_batched_tokens", "rollout.stream_interval", "rollout.environment_hosts",
                "env.max_turns", "env.max_new_tokens", "env.max_failures_in_row", "model.max_context",
                "transfer.full_every", "transfer.keep_versions"):
        need(_value(to_dict(c), key) >= 1, key, "must be at least 1")
    for key in ("trainer.optimizer.lr", "trainer.optimizer.eps", "trainer.optimizer.grad_clip",
                "env.step_timeout_s", "rollout.engine_start_timeout_s", "rollout.turn_timeout_s",
                "cluster.start_timeout_s", "cluster.stop_timeout_s", "transfer.load_timeout_s", 
                "trainer.step_timeout_s"):
        need(_value(to_dict(c), key) > 0, key, "must be greater than 0")
    for key in ("eval.episodes", "eval.every", "eval.temperature", "rollout.engine_restarts", "cluster.gpus",
                "trainer.optimizer.warmup_steps", "trainer.optimizer.weight_decay"):
        need(_value(to_dict(c), key) >= 0, key, "must not be negative")
    need(len(c.trainer.optimizer.betas) == 2 and all(0 <= b < 1 for b in c.trainer.optimizer.betas),
         "trainer.optimizer.betas", "two numbers in [0, 1)")
    need(0 < c.rollout.top_p <= 1, "rollout.top_p", "must be in (0, 1]")
    need(c.rollout.top_k >= 0, "rollout.top_k", "0 for all tokens, or how many")
    need(c.rollout.temperature > 0, "rollout.temperature", "must be greater than 0: greedy rollouts teach nothing")
    need(0 < c.rollout.gpu_memory_utilization <= 1, "rollout.gpu_memory_utilization", "must be in (0, 1]")
    need(c.rollout.kv_cache_gib is None or c.rollout.kv_cache_gib > 0, "rollout.kv_cache_gib", "GiB > 0, or null")
    need(c.algorithm.importance_cap is None or c.algorithm.importance_cap > 0, "algorithm.importance_cap",
         "greater than 0, or null to switch truncated importance sampling off")
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
    need(c.model.source != "folder" or c.model.path is not None, "model.path",
         "the model's folder is needed (model.source=folder)")
    if c.deterministic:
        need(c.rollout.workers == 1, "rollout.workers", "deterministic=true needs one engine: rollout.workers=1")
        need(c.trainer.dtype == "float32", "trainer.dtype", "deterministic=true needs float32")
    need(c.cluster.gpu_memory_gib is None or c.cluster.gpu_memory_gib > 0, "cluster.gpu_memory_gib",
         "GiB > 0, or null")
    gpus = c.trainer.ranks + c.rollout.workers * c.rollout.tensor_parallel
    need(c.cluster.gpus == 0 or gpus <= c.cluster.gpus, "cluster.gpus",
         f"the run needs {gpus} (trainer.ranks={c.trainer.ranks} + rollout.workers={c.rollout.workers} x "
         f"rollout.tensor_parallel={c.rollout.tensor_parallel}); raise it or run fewer")
    ranks = 1 + c.rollout.environment_hosts + c.trainer.ranks + c.rollout.workers
    if c.cluster.slots is not None:
        need(ranks <= c.cluster.slots, "cluster.slots",
             f"the run has {ranks} ranks (1 coordinator + {c.rollout.environment_hosts} environment hosts + "
             f"{c.trainer.ranks} trainer + {c.rollout.workers} rollout); raise it or run fewer")


def check_model(c: Config, shape: ModelShape) -> None:
    """Checks that need the model's shape. Raises `ConfigError`."""
    tp = c.rollout.tensor_parallel
    if shape.heads % tp:
        raise ConfigError(f"rollout.tensor_parallel={tp}: must divide the {shape.heads} attention heads of model "
                          f"{c.model.name}")
    if max(shape.kv_heads, tp) % min(shape.kv_heads, tp):
        raise ConfigError(f"rollout.tensor_parallel={tp}: must divide, or be a multiple of, the {shape.kv_heads} "
                          f"key-value heads of model {c.model.name}")
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
