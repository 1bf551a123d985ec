"""The table of features that exclude each other, and `from_dict`, which refuses a run with two such
features.

`scripts/tabulate_code.py` writes the table into docs/configuration.md. Left out: keys that need, or
are limited by, the value of another key (rose/config/checks).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from operator import attrgetter
from typing import Any, NamedTuple

from rose import config as configuration
from rose.config import Config, ConfigError, ModelShape, errors
from rose.policies import registry
from rose.trainer import algorithms


class Run:
    """A configuration and the classes that it names. `shape`: None if the model isn't known yet."""

    def __init__(self, c: Config, shape: ModelShape | None) -> None:
        self.c, self.trains = c, c.mode == "train"
        self.has_engines = c.rollout.replay is None
        self.experts = shape is not None and shape.experts > 0
        self.algorithm: Any = algorithms.build(c.algorithm.name, c.algorithm.args)
        self.provisioning = registry.policy("provisioning", c.scheduler.provisioning)
        self.batching = registry.policy("batching", c.scheduler.batching)
        self.synchronous = getattr(self.batching, "waits_for_weights", False)

    def wakes_hybrids(self) -> bool:
        """True if the provisioning policy wakes engines that share the trainer's GPUs."""
        joins_resting = getattr(self.provisioning, "joins_resting", lambda kind: False)
        return getattr(self.provisioning, "wakes_hybrids", joins_resting("hybrid"))


class Feature(NamedTuple):
    """A choice that a configuration makes by `key`."""

    key: str
    without: str  # the override of a run without the feature
    used: Callable[[Run], Any]  # true if the run has the feature
    about: str = ""  # the name in the docs; "": the key

    @property
    def name(self) -> str:
        return self.about or f"`{self.key}`"


class Exclusion(NamedTuple):
    """Two features that exclude each other. The error names the key and value of `feature`."""

    feature: Feature
    other: Feature
    because: str = ""  # why both together are impossible; "": they are only not tried
    remedy: str = ""  # the change that helps; "": to drop either feature

    def message(self, tree: dict[str, Any]) -> str:
        """Return the error for `tree`, a configuration with both features."""
        value = errors.value_at(tree, self.other.key)
        other = self.other.name if value is None else _set(self.other.key, value)
        verdict = "impossible" if self.because else "not tried"
        because = f", because {self.because}" if self.because else ""
        remedy = self.remedy or f"{self.feature.without}, or {self.other.without}"
        return (
            f"{self.feature.key}={errors.value_at(tree, self.feature.key)!r}: {verdict} with "
            f"{other}{because}; {remedy}"
        )


def _set(key: str, value: Any) -> str:
    """Return KEY=VALUE as on a command line."""
    return f"{key}={json.dumps(value) if value in (None, True, False) else value}"


def _option(key: str, off: Any = False, without: str = "", about: str = "") -> Feature:
    """Return the feature that a run has if its key's value is neither `off` nor null. A null can't
    conflict, since `rose.launch.choices` replaces it by a value that nothing excludes."""
    value = attrgetter(key)

    def used(run: Run) -> bool:
        return value(run.c) not in (off, None)

    return Feature(key, without or _set(key, off), used, about)


def _value(key: str, on: Any, without: str, about: str = "") -> Feature:
    """Return the feature that a run has if its key has the value `on`."""
    value = attrgetter(key)
    return Feature(key, without, lambda run: value(run.c) == on, about or f"`{_set(key, on)}`")


def _learning(attribute: str, without: str, about: str) -> Feature:
    """Return the feature that a training run has if its algorithm's `attribute` is true."""

    def used(run: Run) -> bool:
        return run.trains and getattr(run.algorithm, attribute, False)

    return Feature("algorithm.name", without, used, about)


BATCHING = "scheduler.batching.name"
PROVISIONING = "scheduler.provisioning.name"
ONE_MACHINE = (
    "cluster=gpus or local, inside one node's allocation as slurm/one_node.sbatch makes it"
)

BESIDE = _option("eval.beside")
BFLOAT16 = _value("trainer.dtype", "bfloat16", "trainer.dtype=float32")
COMPILE = _option("trainer.compile")
DETERMINISTIC = _option("deterministic")
DRAFTS = _option("rollout.draft.method", "none", "rollout/draft=none")
DYNAMIC_SAMPLING = _option("algorithm.dynamic_sampling")
HPZ = _option("trainer.hpz", None)
KERNELS = _option("trainer.kernels", "none")
LORA = _option("trainer.lora", None)
NO_JOINING = _option("cluster.mpi.join", True, "another cluster/mpi=", "an MPI without joining")
NO_PREFIX_CACHE = _option("rollout.prefix_caching", True, about="no `rollout.prefix_caching`")
OFFLOADED_ACTIVATIONS = _option("trainer.offload_activations")
REPLAY = _option("rollout.replay", None)
ROUTER_REPLAY = _option("trainer.router_replay")
SEQUENCE_PARALLEL = _option("trainer.sequence_parallel", 1)
STREAM = _option("trainer.stream")
UPDATES = _option("trainer.updates_per_step", 1)

ADAPTIVE = _option("reward.adaptive")._replace(
    used=lambda r: r.c.reward.adaptive and r.c.reward.pools
)
HYBRID = _option("rollout.hybrid", 0)._replace(used=lambda r: r.c.hybrids > 0)
KEEP_BEST = _option("eval.keep_best")._replace(used=lambda r: r.trains and r.c.eval.keep_best)
PATIENCE = _option("eval.stop.patience", 0)._replace(
    used=lambda r: r.trains and r.c.eval.stop.patience
)
RECORDED = ROUTER_REPLAY._replace(used=lambda r: r.c.trainer.router_replay and r.has_engines)

ASKS_FOR_JOBS = Feature(
    PROVISIONING,
    "scheduler/provisioning=fixed",
    lambda r: r.trains and getattr(r.provisioning, "asks_for_jobs", False),
    "provisioning that requests jobs",
)
BUSY = Feature(
    BATCHING,
    "scheduler/batching=synchronous, dapo, tail_batching, carry_over or another with trainer_waits",
    lambda r: not getattr(r.batching, "trainer_waits", r.synchronous),
    "batching whose trainer rarely waits",
)
COLOCATE = Feature(
    "colocate",
    "two GPUs and colocate=false",
    lambda r: r.c.shares_devices,
    "one GPU or `colocate=true`",
)
ENGINES = Feature(
    "rollout.workers",
    "rollout.workers=1",
    lambda r: r.has_engines and r.c.rollout.workers > 1,
    "several engines",
)
EXPERTS = Feature("model.name", "a dense model", lambda r: r.experts, "a mixture of experts")
DRAFTS_OF_GROUPS = _value("rollout.draft.method", "group", "rollout/draft=ngram or none")
FINISH = _value("transfer.in_flight", "finish", "transfer.in_flight=recompute or keep")
GPUS = _option("cluster.gpus", 0, "cluster.gpus=0", "GPUs")
GROUP_RELATIVE = _learning(
    "group_relative",
    "algorithm=reinforce_pp, which does without groups",
    "an algorithm that compares within groups",
)
LOCAL = _option("cluster.kind", "slurm", "cluster=slurm", "no Slurm")
NCCL = _value("transfer.broadcast", "nccl", "transfer.broadcast=auto or mpi")
NO_BORROWING = _value("serving.borrow", False, "serving=borrow")
NO_HYBRIDS = Feature(
    PROVISIONING,
    "scheduler/provisioning=all_idle or rlboost",
    lambda r: not r.wakes_hybrids(),
    "provisioning that wakes no hybrid engines",
)
OF_BATCH = _learning(
    "advantages_of_batch",
    "an algorithm that compares within groups",
    "an algorithm that normalises over the batch",
)
OF_TURNS = _learning("needs_turn_rewards", "algorithm=grpo", "an algorithm of turns' rewards")
ONE_UPDATE = _learning(
    "one_update",
    "for rloo algorithm.args.clip_low=0.2 and algorithm.args.clip_high=0.2",
    "a loss without a ratio",
)
OVERLAP = Feature(
    BATCHING, "scheduler/batching=synchronous", lambda r: not r.synchronous, "overlapping batching"
)
SINGLE = _value("rollout.group_size", 1, "rollout.group_size=2 or more")
SLURM = _value("cluster.kind", "slurm", ONE_MACHINE, "Slurm")

BLOCKS = "vLLM keeps the experts of prompts by the blocks of its prefix cache"
EARLY = "the trainer works while trajectories run"
IN_TURN = "trainer and engines share devices in turn, and this policy rolls out during training"
TWO_RANKS = "NCCL refuses two ranks on one GPU"
V1 = (
    "vLLM runs ROSE's proposer by its older model runner and without asynchronous scheduling, "
    "which takes more time than the drafts save"
)
UNEVALUATED = "a replay starts no engines, so no held-out task is evaluated"

EXCLUSIONS = (
    Exclusion(ENGINES, DETERMINISTIC, "the machine's speed decides which engine takes a turn"),
    Exclusion(BFLOAT16, DETERMINISTIC),
    Exclusion(STREAM, DETERMINISTIC, "gradients are summed in the order in which groups finish"),
    Exclusion(COMPILE, DETERMINISTIC, "what torch compiles depends on the lengths that it met"),
    Exclusion(KERNELS, DETERMINISTIC),
    Exclusion(DRAFTS, DETERMINISTIC, "a token's random numbers depend on the drafts beside it"),
    Exclusion(ADAPTIVE, DETERMINISTIC, "what a score may take would depend on the machine's speed"),
    Exclusion(RECORDED, DETERMINISTIC, BLOCKS),
    Exclusion(BESIDE, DETERMINISTIC, "evaluation and training would be one after the other"),
    Exclusion(HYBRID, DETERMINISTIC, "a deterministic run has one engine"),
    Exclusion(OVERLAP, COLOCATE, IN_TURN),
    Exclusion(BESIDE, COLOCATE, "evaluation and training share devices in turn"),
    Exclusion(SLURM, COLOCATE, "one machine's devices are shared", ONE_MACHINE),
    Exclusion(NCCL, COLOCATE, TWO_RANKS),
    Exclusion(STREAM, COLOCATE, EARLY),
    Exclusion(HYBRID, COLOCATE, "all engines are on the trainer's devices already"),
    Exclusion(HYBRID, STREAM, EARLY),
    Exclusion(BUSY, HYBRID, "hybrid engines work while the trainer waits for its batch"),
    Exclusion(NO_HYBRIDS, HYBRID, "this policy never wakes them (its attribute wakes_hybrids)"),
    Exclusion(SLURM, HYBRID, "one machine's devices are shared", ONE_MACHINE),
    Exclusion(NCCL, HYBRID, TWO_RANKS),
    Exclusion(STREAM, UPDATES, "which groups belong to an update is known when all are in"),
    Exclusion(STREAM, OF_BATCH, "the whole batch is not known before its last group is in"),
    Exclusion(UPDATES, ONE_UPDATE, "updates behind a step's first would be wrong without a ratio"),
    Exclusion(KERNELS, COMPILE, "both fuse the same operations"),
    Exclusion(COMPILE, SEQUENCE_PARALLEL),
    Exclusion(COMPILE, OFFLOADED_ACTIVATIONS),
    Exclusion(COMPILE, ROUTER_REPLAY),
    Exclusion(COMPILE, EXPERTS),
    Exclusion(HPZ, SEQUENCE_PARALLEL),
    Exclusion(HPZ, EXPERTS),
    Exclusion(LORA, EXPERTS, "the weights of experts are all trained"),
    Exclusion(DRAFTS_OF_GROUPS, GPUS, V1, DRAFTS_OF_GROUPS.without),
    Exclusion(RECORDED, NO_PREFIX_CACHE, BLOCKS),
    Exclusion(RECORDED, DRAFTS),
    Exclusion(ROUTER_REPLAY, SEQUENCE_PARALLEL),
    Exclusion(FINISH, BESIDE, "new weights would wait for evaluation turns"),
    Exclusion(KEEP_BEST, REPLAY, UNEVALUATED),
    Exclusion(PATIENCE, REPLAY, UNEVALUATED),
    Exclusion(ASKS_FOR_JOBS, LOCAL, "this policy submits jobs to Slurm"),
    Exclusion(NO_JOINING, ASKS_FOR_JOBS, "no rank of a job can join the run"),
    Exclusion(ASKS_FOR_JOBS, NO_BORROWING, "no rank of a job may join the run"),
    Exclusion(ASKS_FOR_JOBS, DETERMINISTIC, "no rank of a job may join the run"),
    Exclusion(ASKS_FOR_JOBS, REPLAY, "a replay has no engines"),
    Exclusion(SINGLE, GROUP_RELATIVE, "this algorithm learns nothing from a trajectory alone"),
    Exclusion(SINGLE, DYNAMIC_SAMPLING, "groups with equal rewards are refused"),
    Exclusion(DYNAMIC_SAMPLING, OF_TURNS, "the turns of groups with equal rewards may differ"),
)


def check(c: Config, shape: ModelShape | None = None) -> None:
    """Raise `ConfigError` for two features that exclude each other. `shape`: None if the model
    isn't known yet."""
    run = Run(c, shape)
    for row in EXCLUSIONS:
        if row.feature.used(run) and row.other.used(run):
            raise ConfigError(row.message(configuration.to_dict(c)))


def refusal(c: Config, shape: ModelShape | None, feature: Feature) -> str:
    """Return the name of a feature of `c` that excludes `feature`, also of `c`; "" if none does."""
    run = Run(c, shape)
    for row in EXCLUSIONS:
        if feature in row[:2] and row.feature.used(run) and row.other.used(run):
            return (row.other if row.feature == feature else row.feature).name.replace("`", "")
    return ""


def from_dict(tree: dict[str, Any], **kinds: Any) -> Config:
    """Convert and check a tree as `rose.config.from_dict` does, fill in the keys that the batching
    policy decides, and check the exclusions. Raises `ConfigError`."""
    c = registry.resolved(configuration.from_dict(tree, **kinds))
    check(c)
    return c
